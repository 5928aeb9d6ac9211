"""The client of a vLLM server, 0.22 to 0.32: completions by token ids, weights, versions, sleep.

Weights are loaded from files (`reload_weights`), as a LoRA adapter, or over vLLM's weight transfer
(transfer.py). `connect` asks what the server's version offers:

- `/weight_info` (0.32): the server stores the version of its weights. Earlier ones are recognized by the
  `instance_id` of the server process.
- 0.22 to 0.25 answer `/start_weight_update` only with a JSON body; an empty one suits all.
- 0.24's IPC imports ray (`command` asks for it only where that works).
"""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from whetstone.config import Config
from whetstone.engines.base import SamplingParams
from whetstone.engines.servers import settings
from whetstone.engines.servers.client import InvalidReply, Reply, Server, parse_reply
from whetstone.engines.servers.http import PUSH_TIMEOUT_S, RequestRejected, Unreachable
from whetstone.engines.servers.process import ServerCommand
from whetstone.engines.servers.vllm.transfer import Transfer, make_transfer
from whetstone.engines.servers.weights import WeightUpdate
from whetstone.errors import UserError
from whetstone.model.policy import choose_device

OLDEST, NEWEST = (0, 22), (0, 32)
REMEDY = "start it with `whet serve CONFIG`, or as docs/servers.md shows"


class VLLMServer(Server):
    model = ""  # the name to request; an adapter's, once there is one
    base_model = ""
    reports_weight_version = False  # whether the server itself stores the version of its weights
    has_processed_logprobs = False
    sent_version: str | None = None
    transfer: Transfer | None = None

    def connect(self) -> None:
        version = self.http.get("/version")["version"]
        if not OLDEST <= parse_version(version) <= (*NEWEST, 99):
            raise UserError(f"{self.url} runs vLLM {version}: install 0.22 to 0.32 there.")
        self.base_model = self.model = self.http.get("/v1/models")["data"][0]["id"]
        info = self._settings()
        model = info["model_config"]
        self.has_processed_logprobs = model["logprobs_mode"] == "processed_logprobs"
        self.can_release, self.asleep = ["weights", "kv_cache"] if model.get("enable_sleep_mode") else [], []
        self._check_length(model["max_model_len"], "--max-model-len")
        self.reports_weight_version = False
        with contextlib.suppress(RequestRejected):
            self.http.get("/weight_info")
            self.reports_weight_version = True
        backend = (info.get("weight_transfer_config") or {}).get("backend")
        method = backend if self.weight_transfer == "auto" else self.weight_transfer
        method = method if method in ("nccl", "ipc") else "disk"
        if method != "disk" and backend != method:
            raise UserError(
                f"weight_transfer is {method}, but {self.url} was started for {backend or 'files'}: set "
                f'it to auto, or give the server --weight-transfer-config \'{{"backend": "{method}"}}\'.'
            )
        self.wants_folder = method == "disk"
        self.transfer = make_transfer(method, self.http, self.group_port)

    def _settings(self) -> dict[str, Any]:
        """The server's own configuration."""
        try:
            info = self.http.get("/server_info?config_format=json")
        except RequestRejected as error:
            if error.status != 404:
                raise
            raise UserError(
                f"{self.url} runs without VLLM_SERVER_DEV_MODE=1, so it can't be given new weights: {REMEDY}."
            ) from None
        return info["vllm_config"]

    def load(self, update: WeightUpdate) -> None:
        self._wake("weights")  # the cache may sleep on
        identity = self._identity()
        if update.policy.is_lora:
            self._load_adapter(update)
        elif self.transfer is not None:
            self.transfer.send(update)
        else:
            assert update.folder is not None
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(update.folder)}}
            self.http.post("/collective_rpc", body, PUSH_TIMEOUT_S)
        # What is cached was computed with the old weights.
        self.http.post("/reset_prefix_cache", {})
        if self.reports_weight_version:
            self.http.post("/update_weight_version", {"new_version": update.version})
        if self._identity() != identity:
            raise Unreachable("it was started anew while it took the weights")
        self.identity, self.sent_version = identity, update.version

    def _load_adapter(self, update: WeightUpdate) -> None:
        """An adapter's name is the label of its version, so a server that has lost it can't answer."""
        assert update.folder is not None
        before, name = self.model, update.version
        try:
            self.http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(update.folder)})
        except RequestRejected as error:
            if error.status == 404 and "Not Found" in str(error):
                raise UserError(
                    f"{self.url} can't be given LoRA adapters: start it with --enable-lora and "
                    f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ({REMEDY})."
                ) from None
            if "already been loaded" not in str(error):  # by another process of the run
                raise
        self.model = name
        if before not in (self.base_model, name):
            self.http.post("/v1/unload_lora_adapter", {"lora_name": before})

    def accept_existing_weights(self, update: WeightUpdate, loaded_instance: str | None) -> bool:
        identity = self._identity()
        known = self.reports_weight_version and self._reported_version() == update.version
        if identity != loaded_instance and not known:
            return False
        if update.policy.is_lora:
            self.model = update.version
        self.identity, self.sent_version = identity, update.version
        return True

    def loaded_version(self) -> str:
        if self.reports_weight_version and not self.is_shared:
            return self._reported_version()
        return self.sent_version or "none" if self._identity() == self.identity else "of a new start"

    def _reported_version(self) -> str:
        return self.http.get("/weight_info")["weight_version"]

    def _identity(self) -> str:
        """Drawn anew at every start of a server."""
        return str(self._settings()["instance_id"])

    def complete(self, prompt_ids: Sequence[int], seed: int, sampling: SamplingParams) -> Reply:
        is_plain = sampling.temperature in (0.0, 1.0) and not sampling.is_filtered
        if not (self.has_processed_logprobs or is_plain):
            raise UserError(
                f"{self.url} gives logprobs of temperature 1 without filters, but sampling has "
                f"{sampling.temperature:g}, top_p {sampling.top_p:g}: add --logprobs-mode processed_logprobs."
            )
        body = {
            **self._sampling_body(sampling),
            "ignore_eos": True,  # the stop tokens are named; the server's own would count as well
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "top_k": sampling.top_k,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        try:
            answer = self.http.post("/v1/completions", body, self.request_timeout_s)
        except RequestRejected as error:
            if error.status == 404 and self.model != self.base_model:
                raise Unreachable(f"it has lost the adapter {self.model}: it was started anew") from None
            raise
        return self._reply(answer, prompt_ids, sampling)

    def _reply(self, answer: Any, prompt_ids: Sequence[int], sampling: SamplingParams) -> Reply:
        try:
            (choice,) = answer["choices"]
            echoed, token_ids = choice["prompt_token_ids"], choice["token_ids"]
            logprobs, finish = choice["logprobs"]["token_logprobs"], choice["finish_reason"]
            model = answer["model"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidReply(f"something without {error} ({str(answer)[:120]})") from None
        if finish == "abort":
            raise Unreachable("it broke the completion off")
        if echoed != list(prompt_ids):
            raise InvalidReply("another prompt than it was given")
        version = model if self.model != self.base_model else None
        return parse_reply(
            token_ids, logprobs, finish, weight_version=version, sampling=sampling, stops=self.stops
        )

    def _release(self) -> None:
        self.http.post("/sleep?level=1", {})  # weights are offloaded to the CPU, the cache is discarded

    def _resume(self, tag: str) -> None:
        self.http.post("/wake_up?" + urlencode({"tags": tag}), {})


def parse_version(text: str) -> tuple[int, ...]:
    """`0.24.0+cu130` -> (0, 24, 0)."""
    parts = itertools.takewhile(str.isdigit, text.split("+")[0].split("."))
    return tuple(int(part) for part in parts)


def command(config: Config, *, devices: str | None, host: str, port: int) -> ServerCommand:
    """The command line of `vllm serve`; `devices`: its own GPUs, or None where it uses the trainer's."""
    python = settings.server_python(config, "vllm", "Starting a vLLM server")
    on_gpu = choose_device(config.model.device).type == "cuda"
    args = [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", settings.model_folder(config)]
    args += ["--served-model-name", "policy", "--host", host, "--port", str(port)]
    args += ["--dtype", "bfloat16" if config.model.bf16 and on_gpu else "float32"]
    args += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    args += ["--max-num-seqs", str(settings.max_slots(config))]
    args += ["--seed", str(config.run.seed % 2**32)]
    if (length := settings.max_model_length(config)) is not None:
        args += ["--max-model-len", str(length)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.model.use_peft:
        args += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2"]
        args += ["--max-lora-rank", str(settings.lora_rank(config))]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if on_gpu:
        fraction = settings.memory_fraction(config, alone=devices is not None)
        args += ["--gpu-memory-utilization", f"{fraction:g}"]
        args += ["--tensor-parallel-size", str(config.engines.server_tensor_parallel_size)]
        backend = transfer_backend(config, alone=devices is not None)
        if backend is not None:
            args += ["--weight-transfer-config", json.dumps({"backend": backend})]
        if backend == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the handles travel pickled
        if devices is None and config.engines.server_enable_sleep_mode:
            args += ["--enable-sleep-mode"]
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
    else:
        args += ["--enforce-eager"]
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")
    return settings.make_command(config, args, environment, host, port)


def transfer_backend(config: Config, *, alone: bool) -> str | None:
    """vLLM's own way for the weights: NCCL between GPUs, IPC on one GPU (NCCL can't have it twice)."""
    is_here = importlib.util.find_spec("vllm") is not None  # or only in the server's environment
    if not is_here or config.model.use_peft or config.engines.weight_transfer == "disk":
        return None
    if config.engines.weight_transfer != "auto":
        return config.engines.weight_transfer
    if alone:
        return "nccl"
    # Older versions import ray for IPC, whether it is used or not.
    has_ray = importlib.util.find_spec("ray") is not None
    return "ipc" if has_ray or parse_version(importlib.metadata.version("vllm")) >= (0, 32) else None
