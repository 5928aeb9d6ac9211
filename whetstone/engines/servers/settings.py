"""Settings that the servers of vLLM and SGLang derive from a configuration in the same way."""

import importlib.util
import shutil
import sys
from pathlib import Path

from whetstone.config import Config
from whetstone.config.engine_traits import ENGINE_TRAITS
from whetstone.engines.servers.process import ServerCommand
from whetstone.errors import UserError
from whetstone.model.hub import base_and_adapter
from whetstone.model.size import longrope_length

MAX_SLOTS = 256  # concurrent requests of a server, if max_num_seqs is not set
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


def require_package(package: str, setting: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{setting} needs the package {package}: {ENGINE_TRAITS[package].install}, or name a server that "
            "runs elsewhere with rollout_servers=http://HOST:PORT."
        )


def server_python(config: Config, package: str, setting: str) -> str:
    """The interpreter that runs servers; in ours, the package must be installed."""
    named = config.engines.server_python
    if named is None:
        require_package(package, setting)
        return sys.executable
    path = shutil.which(Path(named).expanduser())
    if path is None:
        raise UserError(f"server_python: {named} is no program: name the interpreter that has {package}.")
    return str(Path(path).absolute())  # not resolved: it is a link in a virtual environment


def max_slots(config: Config) -> int:
    return config.rollout.max_num_seqs or MAX_SLOTS


def model_folder(config: Config) -> str:
    """The model that a server starts with: the one that training starts with."""
    base, _ = base_and_adapter(config.model.model_name_or_path)
    return str(Path(base).resolve()) if Path(base).is_dir() else str(base)


def max_model_length(config: Config) -> int | None:
    """None: what the model allows. vLLM takes the long factors of LongRoPE for every model length above that
    of the short ones, which training has.
    """
    length = config.engines.server_max_model_length
    prompt = config.rollout.max_prompt_length
    if length is None and prompt is not None:
        length = prompt + config.rollout.max_completion_length
    longrope = _longrope_length(model_folder(config))
    return length if longrope is None else min(length or longrope, longrope)


def _longrope_length(model: str) -> int | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError):  # the server fetches it, and says what is wrong with it
        return None
    return longrope_length(config.get_text_config())


def lora_rank(config: Config) -> int:
    return next((rank for rank in LORA_RANKS if rank >= config.model.lora_r), config.model.lora_r)


def memory_fraction(config: Config, *, alone: bool) -> float:
    return config.engines.server_gpu_memory_utilization or (0.9 if alone else 0.3)


def make_command(
    config: Config, args: list[str], environment: dict[str, str], host: str, port: int
) -> ServerCommand:
    address = "127.0.0.1" if host == "0.0.0.0" else host
    url = f"http://{address}:{port}"
    return ServerCommand(args=[*args, *config.engines.server_args], environment=environment, url=url)
