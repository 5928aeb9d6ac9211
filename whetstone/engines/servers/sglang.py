"""The client of an SGLang server over its native interface.

Every reply names the version of its weights. Its logprobs have the temperature, but not top-p, top-k or
min-p. Written from the sources of 0.5.16 and 0.5.23, which differ:

- 0.5.16 reports `length` where the last allowed token is a stop token.
- 0.5.16 ends with an assertion where its cache is flushed, or its memory released, during a request.
- 0.5.23 takes tensors only between `/begin_weight_update` and `/end_weight_update`.
"""

import base64
import contextlib
import io
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from whetstone.config import Config
from whetstone.engines.base import SamplingParams
from whetstone.engines.servers import settings
from whetstone.engines.servers.client import InvalidReply, Reply, Server, parse_reply
from whetstone.engines.servers.http import (
    PUSH_TIMEOUT_S,
    RequestRejected,
    Unreachable,
    free_port,
    own_address,
)
from whetstone.engines.servers.process import ServerCommand
from whetstone.engines.servers.weights import BUCKET_BYTES, WeightUpdate, buckets, describe, named_weights
from whetstone.errors import UserError
from whetstone.parallel import external_group

SEEDS = 2**31 - 1  # SGLang keeps them in 32 bits
IDLE_TIMEOUT_S = 30  # it notices within 4 s that a client is gone
CONTEXT_SLACK = 8  # tokens of its context length that it leaves empty


class SGLangServer(Server):
    adapter: str | None = None  # the name of the LoRA adapter to sample with
    num_workers = 1
    group: Any = None  # the process group that sends weights
    group_name = ""

    def connect(self) -> None:
        info = self._get("/server_info", "/get_server_info")
        self.adapter, self.asleep = None, []
        self.wants_folder = self.weight_transfer not in ("nccl", "ipc")
        self._leave_group()
        # Weights released without a copy would have to be sent again at every wake.
        keeps_copy, can_sleep = info.get("enable_weights_cpu_backup"), info.get("enable_memory_saver")
        self.can_release = (["weights", "kv_cache"] if keeps_copy else ["kv_cache"]) if can_sleep else []
        self.num_workers = int(info.get("tp_size") or 1)
        if self.weight_transfer == "ipc" and self.num_workers > 1:
            raise UserError(f"{self.url} has several GPUs: set weight_transfer to nccl or disk.")
        self._check_length(info.get("context_length"), "--context-length")

    def _get(self, path: str, older: str) -> Any:
        """`older`: the endpoint's name in older versions."""
        try:
            return self.http.get(path)
        except RequestRejected as error:
            if error.status != 404:
                raise
            return self.http.get(older)

    def load(self, update: WeightUpdate) -> None:
        self._wake("weights")  # the cache may sleep on
        self._wait_until_idle()
        if update.policy.is_lora:
            self._load_adapter(update)
        elif not self.wants_folder:
            self._send(update)
        else:
            assert update.folder is not None
            body = {"model_path": str(update.folder), "weight_version": update.version, "flush_cache": False}
            self.http.post("/update_weights_from_disk", body, PUSH_TIMEOUT_S)
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        """Flush the cache, once requests that we cancelled have ended: it still samples them for a while."""
        if not self.is_shared:
            self.http.post("/abort_request", {"abort_all": True})
        try:
            self.http.post(f"/flush_cache?timeout={IDLE_TIMEOUT_S}", {})
        except RequestRejected as error:
            raise Unreachable(f"it still has requests: {error}") from None

    def _load_adapter(self, update: WeightUpdate) -> None:
        assert update.folder is not None
        self.http.post("/load_lora_adapter", {"lora_name": update.version, "lora_path": str(update.folder)})
        before, self.adapter = self.adapter, update.version
        # 0.5.16 waits for ever for a request whose client has left; the adapter then stays in its memory.
        if before is not None and not self.http.has_cancelled:
            self.http.post("/unload_lora_adapter", {"lora_name": before})
        self.http.has_cancelled = False
        self.http.post("/update_weight_version", {"new_version": update.version, "abort_all_requests": False})

    def _send(self, update: WeightUpdate) -> None:
        """Send tensors in buckets. The version counts once all of them are there."""
        device = update.policy.device
        if self.weight_transfer == "ipc" and device.type != "cuda":
            raise UserError("weight_transfer: ipc needs the trainer on a GPU: set weight_transfer: disk.")
        if self.weight_transfer == "nccl" and self.group is None:
            self._join(device)
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device, self._session():
                for bucket in buckets(named_weights(update.policy), BUCKET_BYTES):
                    self._send_bucket([(name, tensor.contiguous()) for name, tensor in bucket])
        except RuntimeError as error:  # NCCL, gloo and CUDA speak this way
            raise Unreachable(f"the transfer of the weights broke off ({error})") from None
        self.http.post("/update_weight_version", {"new_version": update.version, "abort_all_requests": False})

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Versions before 0.5.23 have none."""
        with contextlib.ExitStack() as stack:
            try:
                self.http.post("/begin_weight_update", {}, PUSH_TIMEOUT_S)
                stack.callback(self.http.post, "/end_weight_update", {}, PUSH_TIMEOUT_S)
            except RequestRejected as error:
                if error.status != 404:
                    raise
            yield

    def _join(self, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.group_name = f"whetstone-{uuid.uuid4().hex[:8]}"
        address, port = own_address(self.http.host), self.group_port or free_port()
        world_size = self.num_workers + 1
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": self.group_name,
            "backend": backend,
        }
        with self.http.posting("/init_weights_update_group", body):
            try:
                self.group = external_group.join(
                    address, port, rank=0, world_size=world_size, name=self.group_name, backend=backend
                )
            except RuntimeError as error:
                raise Unreachable(f"no process group came about with it ({error})") from None

    def _send_bucket(self, bucket: list[tuple[str, Tensor]]) -> None:
        if self.weight_transfer == "ipc":
            pickled = io.BytesIO()
            IPCPickler(pickled).dump(bucket)
            body = {"serialized_named_tensors": [base64.b64encode(pickled.getvalue()).decode("ascii")]}
            self.http.post("/update_weights_from_tensor", {**body, "flush_cache": False}, PUSH_TIMEOUT_S)
            torch.cuda.ipc_collect()
            return
        names, dtypes, shapes = describe(bucket)
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": self.group_name}
        with self.http.posting("/update_weights_from_distributed", {**body, "flush_cache": False}):
            external_group.broadcast([tensor for _, tensor in bucket], self.group)

    def accept_existing_weights(self, update: WeightUpdate, loaded_instance: str | None) -> bool:
        if self.loaded_version() != update.version:
            return False
        self.adapter = update.version if update.policy.is_lora else None
        return True

    def loaded_version(self) -> str:
        return str(self._get("/model_info", "/get_model_info").get("weight_version"))

    def complete(self, prompt_ids: Sequence[int], seed: int, sampling: SamplingParams) -> Reply:
        params = {
            **self._sampling_body(sampling),
            "ignore_eos": sampling.ignore_eos,  # true: it stops at no token, not even at those that are named
            "max_new_tokens": sampling.max_tokens,
            "top_k": sampling.top_k or -1,
            "no_stop_trim": True,
            "sampling_seed": seed % SEEDS,
        }
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "lora_path": self.adapter,
        }
        try:
            answer = self.http.post("/generate", body, self.request_timeout_s)
        except RequestRejected:
            if self.adapter is not None and self.loaded_version() != self.adapter:
                raise Unreachable("it has lost the adapter: it was started anew") from None
            raise
        try:
            token_ids, meta = answer["output_ids"], answer["meta_info"]
            pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
            reason, version = meta["finish_reason"], meta["weight_version"]
            # It also stops at the tokens of the model's and the tokenizer's configuration, and says at which.
            finish, stops = reason["type"], [*self.stops, reason.get("matched")]
            if finish == "length" and token_ids[-1] in sampling.stop_ids(self.stops):
                finish = "stop"
        except (KeyError, TypeError, IndexError) as error:
            raise InvalidReply(f"something without {error} ({str(answer)[:120]})") from None
        if finish == "abort":
            raise Unreachable("it broke the completion off")
        if [token for _, token in pairs] != token_ids:
            raise InvalidReply("logprobs of other tokens than its own")
        logprobs = [logprob for logprob, _ in pairs]
        return parse_reply(
            token_ids, logprobs, finish, weight_version=version, sampling=sampling, stops=stops
        )

    def _release(self) -> None:
        self._wait_until_idle()
        self.http.post("/release_memory_occupation", {"tags": self.can_release})

    def _resume(self, tag: str) -> None:
        self.http.post("/resume_memory_occupation", {"tags": [tag]})

    def close(self) -> None:
        self._leave_group()

    def _leave_group(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # the server may be gone
                external_group.leave(group)


class IPCPickler(ForkingPickler):
    """Handles of CUDA memory that name the GPU by its UUID: the server may count its GPUs otherwise."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, args = reduce_tensor(obj)
        gpu = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*args[:6], gpu, *args[7:])


def command(config: Config, *, devices: str | None, host: str, port: int) -> ServerCommand:
    """The command line of an SGLang server for a configuration."""
    python = settings.server_python(config, "sglang", "Starting an SGLang server")
    args = [python, "-P", "-m", "sglang.launch_server", "--model-path", settings.model_folder(config)]
    args += ["--host", host, "--port", str(port), "--random-seed", str(config.run.seed % SEEDS)]
    # Its kernels on NVIDIA GPUs have no float32; it serves such checkpoints in float16 itself.
    args += ["--dtype", "bfloat16" if config.model.bf16 else "float16"]
    args += ["--max-running-requests", str(settings.max_slots(config))]
    args += ["--mem-fraction-static", f"{settings.memory_fraction(config, alone=devices is not None):g}"]
    args += ["--tp-size", str(config.engines.server_tensor_parallel_size)]
    if (length := settings.max_model_length(config)) is not None:
        args += ["--context-length", str(length + CONTEXT_SLACK)]
    if config.model.use_peft:
        args += ["--enable-lora", "--max-loras-per-batch", "2", "--lora-target-modules", "all"]
        args += ["--max-lora-rank", str(settings.lora_rank(config))]
    if devices is None and config.engines.server_enable_sleep_mode:
        args += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # by the slack, which no request uses
    environment |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    return settings.make_command(config, args, environment, host, port)
