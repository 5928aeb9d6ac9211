"""An SGLang server over its native interface: `/generate` by token ids, `update_weights_from_disk` and
`update_weights_from_distributed`, `flush_cache`, release and resume of memory, LoRA adapters.

Every answer names the version of the weights (`weight_version`), so none has to be confirmed. Its logprobs
are those of the temperature, without top-p, top-k or min-p. The package itself is needed only to start a
server.

Written from the sources of SGLang 0.5.23 and tested against a server of ours that speaks this interface (no
build of SGLang runs on a CPU here).
"""

import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from whetstone.config import Config
from whetstone.engines.base import Sampling
from whetstone.engines.servers.client import (
    CONTROL_TIMEOUT_S,
    HEALTH_TIMEOUT_S,
    MAX_SLOTS,
    PUSH_TIMEOUT_S,
    Malformed,
    Reply,
    reply_of,
)
from whetstone.engines.servers.http import Calls, Refused, Unreachable, free_port, own_address
from whetstone.engines.servers.process import Command
from whetstone.engines.servers.weights import BUCKET_BYTES, Push, buckets
from whetstone.errors import UserError
from whetstone.parallel import external_group

SEEDS = 2**31 - 1  # SGLang keeps them in 32 bits


class SGLangServer:
    def __init__(
        self,
        url: str,
        *,
        stops: tuple[int, ...],
        max_tokens: int,
        weight_transfer: str,
        group_port: int | None,
        request_timeout_s: float,
        is_shared: bool = False,  # of no importance here: every answer names its weights
    ):
        self.calls = Calls(url)
        self.stops = stops
        self.max_tokens = max_tokens
        self.weight_transfer = weight_transfer
        self.group_port = group_port
        self.request_timeout_s = request_timeout_s
        self.wants_folder = weight_transfer != "nccl"
        self.identity: str | None = None
        self.adapter: str | None = None  # the name of the one to sample with
        self.can_release: list[str] = []  # parts of its memory
        self.asleep: list[str] = []  # those that are released
        self.num_workers = 1
        self.group: Any = None
        self.group_name = ""

    def is_healthy(self) -> bool:
        try:
            self.calls.get("/health", timeout_s=HEALTH_TIMEOUT_S)
        except (Unreachable, Refused):
            return False
        return True

    def connect(self) -> None:
        if self.weight_transfer == "ipc":
            raise UserError("SGLang takes weights by file or NCCL here: set weight_transfer to disk or nccl.")
        info = self._get("/server_info", "/get_server_info")
        self.adapter, self.asleep, self.group = None, [], None
        # Weights that are let go without a copy would have to be sent again at every waking.
        keeps_copy = bool(info.get("enable_weights_cpu_backup"))
        self.can_release = ["weights", "kv_cache"] if keeps_copy else ["kv_cache"]
        if not info.get("enable_memory_saver"):
            self.can_release = []
        self.num_workers = int(info.get("tp_size") or 1)
        length = info.get("context_length")
        if length is not None and length <= self.max_tokens:
            raise UserError(
                f"{self.calls.url} takes {length} tokens at most, prompt and completion together, but "
                f"max_completion_length is {self.max_tokens}: start it with a larger --context-length, or "
                "lower max_completion_length."
            )

    def _get(self, path: str, older: str) -> Any:
        """`older`: the name of the same before it was shortened."""
        try:
            return self.calls.get(path, timeout_s=CONTROL_TIMEOUT_S)
        except Refused as error:
            if error.status != 404:
                raise
            return self.calls.get(older, timeout_s=CONTROL_TIMEOUT_S)

    def _post(self, path: str, body: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return self.calls.post(path, body, timeout_s=timeout_s)

    # Weights

    def load(self, push: Push) -> None:
        self._wake("weights")  # the cache may sleep on
        if push.is_adapter:
            self._load_adapter(push)
        elif self.weight_transfer == "nccl":
            self._send(push)
        else:
            assert push.folder is not None
            body = {"model_path": str(push.folder), "weight_version": push.label, "flush_cache": True}
            self._post("/update_weights_from_disk", body, PUSH_TIMEOUT_S)
        self._post("/flush_cache", {})

    def _load_adapter(self, push: Push) -> None:
        assert push.folder is not None
        self._post("/load_lora_adapter", {"lora_name": push.label, "lora_path": str(push.folder)})
        before, self.adapter = self.adapter, push.label
        if before is not None:
            self._post("/unload_lora_adapter", {"lora_name": before})
        self._post("/update_weight_version", {"new_version": push.label, "abort_all_requests": False})

    def _send(self, push: Push) -> None:
        """Broadcast the weights to the server's workers. The version counts once the last bucket is there."""
        if self.group is None:
            self._join(push.policy.device)
        parts = list(buckets(push.tensors(), BUCKET_BYTES))
        for number, bucket in enumerate(parts):
            self._send_bucket(bucket, push.label if number + 1 == len(parts) else None)

    def _join(self, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.group_name = f"whetstone-{uuid.uuid4().hex[:8]}"
        address, port = own_address(self.calls.host), self.group_port or free_port()
        world_size = self.num_workers + 1
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": self.group_name,
            "backend": backend,
        }
        with ThreadPoolExecutor(max_workers=1) as pool:
            # The server waits for us in this call, and we for it in the next line.
            told = pool.submit(self._post, "/init_weights_update_group", body, PUSH_TIMEOUT_S)
            try:
                self.group = external_group.join(
                    address, port, rank=0, world_size=world_size, name=self.group_name, backend=backend
                )
            except RuntimeError as error:
                raise Unreachable(f"no process group came about with it ({error})") from None
            told.result()

    def _send_bucket(self, bucket: list[tuple[str, Tensor]], label: str | None) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.group_name,
            "flush_cache": label is not None,
            "weight_version": label,
        }
        with ThreadPoolExecutor(max_workers=1) as pool:
            told = pool.submit(self._post, "/update_weights_from_distributed", body, PUSH_TIMEOUT_S)
            try:
                external_group.broadcast([tensor.contiguous() for _, tensor in bucket], self.group)
            except RuntimeError as error:  # NCCL and gloo speak this way
                raise Unreachable(f"the transfer of the weights broke off ({error})") from None
            told.result()

    def adopt(self, push: Push, holder: str | None) -> bool:
        if self.version() != push.label:
            return False
        self.adapter = push.label if push.is_adapter else None
        return True

    def version(self) -> str:
        return str(self._get("/model_info", "/get_model_info").get("weight_version"))

    # Sampling

    def complete(self, prompt_ids: Sequence[int], seed: int, sampling: Sampling) -> Reply:
        stops = [] if sampling.ignore_stop else list(self.stops)
        params = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": stops,
            "ignore_eos": True,  # the stop tokens are named
            "no_stop_trim": True,
            "skip_special_tokens": False,
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
            answer = self._post("/generate", body, self.request_timeout_s)
        except Refused:
            if self.adapter is not None and self.version() != self.adapter:
                raise Unreachable("it has lost the adapter: it was started anew") from None
            raise
        try:
            token_ids, meta = answer["output_ids"], answer["meta_info"]
            pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
            finish, version = meta["finish_reason"]["type"], meta["weight_version"]
        except (KeyError, TypeError, IndexError) as error:
            raise Malformed(f"something without {error} ({str(answer)[:120]})") from None
        if finish == "abort":
            raise Unreachable("it broke the completion off")
        if [token for _, token in pairs] != token_ids:
            raise Malformed("logprobs of other tokens than its own")
        logprobs = [logprob for logprob, _ in pairs]
        return reply_of(token_ids, logprobs, finish, version=version, sampling=sampling, stops=set(stops))

    # Memory

    def sleep(self) -> None:
        if self.can_release and not self.asleep:
            self._post("/release_memory_occupation", {"tags": self.can_release})
            self.asleep = list(self.can_release)

    def wake(self) -> None:
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, part: str) -> None:
        if part in self.asleep:
            self._post("/resume_memory_occupation", {"tags": [part]})
            self.asleep.remove(part)


def command(config: Config, *, devices: str | None, host: str, port: int) -> Command:
    """The command line of an SGLang server for a configuration."""
    from importlib.util import find_spec

    from whetstone.engines.servers.vllm.command import lora_rank, max_model_length, memory_share, model_folder

    if find_spec("sglang") is None:
        raise UserError(
            "Starting an SGLang server needs the package sglang, which is not installed here: pip install "
            "sglang, or name a server that runs elsewhere with rollout_servers=http://HOST:PORT."
        )
    words = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", model_folder(config)]
    words += ["--host", host, "--port", str(port), "--random-seed", str(config.run.seed % SEEDS)]
    words += ["--dtype", "bfloat16" if config.model.bf16 else "float32"]
    words += ["--max-running-requests", str(config.rollout.max_num_seqs or MAX_SLOTS)]
    words += ["--mem-fraction-static", f"{memory_share(config, alone=devices is not None):g}"]
    words += ["--tp-size", str(config.engines.server_tensor_parallel_size)]
    if (length := max_model_length(config)) is not None:
        words += ["--context-length", str(length)]
    if config.model.use_peft:
        words += ["--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", str(lora_rank(config))]
        words += ["--lora-target-modules", "all"]
    if devices is None and config.engines.server_enable_sleep_mode:
        words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    reach = "127.0.0.1" if host == "0.0.0.0" else host
    return Command(
        words=[*words, *config.engines.server_args], environment=environment, url=f"http://{reach}:{port}"
    )
