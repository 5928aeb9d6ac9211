"""The command line of `vllm serve` for a configuration.

The flags that matter for training: logprobs of the sampling distribution, no sampling defaults of the model's
folder, the endpoints for weights (`VLLM_SERVER_DEV_MODE`), runtime LoRA.
"""

import json
import os
import sys

from whetstone.config import Config
from whetstone.engines.servers import settings
from whetstone.engines.servers.process import ServerCommand
from whetstone.model.policy import choose_device

NAME = "policy"


def command(config: Config, *, devices: str | None, host: str, port: int) -> ServerCommand:
    """`devices`: GPUs of its own, or None where it runs on those that the trainer uses."""
    settings.require_package("vllm", "Starting a vLLM server")
    on_gpu = choose_device(config.model.device).type == "cuda"
    args = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", settings.model_folder(config)]
    args += ["--served-model-name", NAME, "--host", host, "--port", str(port)]
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
        args += [
            "--gpu-memory-utilization",
            f"{settings.memory_fraction(config, alone=devices is not None):g}",
        ]
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
    if config.model.use_peft or config.engines.weight_transfer == "disk":
        return None
    if config.engines.weight_transfer != "auto":
        return config.engines.weight_transfer
    return "nccl" if alone else "ipc" if _ipc_is_here() else None


def _ipc_is_here() -> bool:
    """Older versions import ray for it, whether it is used or not."""
    from importlib.metadata import version
    from importlib.util import find_spec

    from whetstone.engines.servers.vllm.server import parse_version

    return find_spec("ray") is not None or parse_version(version("vllm")) >= (0, 32)
