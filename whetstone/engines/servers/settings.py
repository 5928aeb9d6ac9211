"""Settings that the servers of vLLM and SGLang derive from a configuration in the same way."""

from pathlib import Path

from whetstone.config import Config
from whetstone.model.hub import base_and_adapter

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


def model_folder(config: Config) -> str:
    """The model that a server starts with: the one that training starts with."""
    base, _ = base_and_adapter(config.model.model_name_or_path)
    return str(Path(base).resolve()) if Path(base).is_dir() else str(base)


def max_model_length(config: Config) -> int | None:
    if config.engines.server_max_model_length is not None:
        return config.engines.server_max_model_length
    prompt = config.rollout.max_prompt_length
    return None if prompt is None else prompt + config.rollout.max_completion_length


def lora_rank(config: Config) -> int:
    return next((rank for rank in LORA_RANKS if rank >= config.model.lora_r), config.model.lora_r)


def memory_fraction(config: Config, *, alone: bool) -> float:
    return config.engines.server_gpu_memory_utilization or (0.9 if alone else 0.3)
