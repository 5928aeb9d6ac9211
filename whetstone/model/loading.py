"""A model and its tokenizer from a folder or the hub, or one sentence that says why not.

Folders may be damaged or hostile. Files are checked before transformers builds anything; code of a folder is
never run, pickles are read as weights only, and a tensor that the files lack is refused.
"""

import contextlib
import functools
import json
import logging
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whetstone.errors import UserError, is_panic
from whetstone.model import fla
from whetstone.model.limited import ask
from whetstone.model.manifest import NAME, Damage, check_sizes, damaged_files, read_manifest

if TYPE_CHECKING:
    import torch

REMEDY = (
    "give a folder with config.json, weights and tokenizer, a hub name you have access to, pebble or "
    "smollm2-135m"
)
TOKENIZER_S, TOKENIZER_MEMORY = 20.0, 4 << 30
# Every printable character, other scripts, and a long word that a pattern can't match to its end.
TOKENIZER_TEXT = "".join(map(chr, range(32, 127))) + " The answer is 42.\n\té 你好 😀 " + 60 * "a" + "!"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
logger = logging.getLogger("whetstone")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,9})\.")


def load_pretrained(base: str, dtype: "torch.dtype | str") -> tuple[Any, Any]:
    """The tokenizer and the model of a folder or hub name, complete and fitting each other.

    The dtype `auto` is the one that the weights are stored in.
    """
    from transformers import AutoConfig, AutoTokenizer

    names: set[str] = set()
    if Path(base).is_dir():
        names = check_weights(Path(base))
        try_tokenizer(Path(base))
    if (problem := fla.installed_problem()) is not None:
        fla.block_fla()
    options: Any = {"dtype": dtype, "weights_only": True, "output_loading_info": True}
    with quiet_transformers(), guarded(base):
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        loaded: Any = model_class(config).from_pretrained(base, trust_remote_code=False, **options)
    model, info = loaded
    if has_vision(config):  # the tower sees nothing here: it is kept as it is
        parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]
        trained = {id(parameter) for part in parts for parameter in part.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if problem is not None and "linear_attention" in kinds:
        logger.warning(f"{problem}: torch's rule computes its layers, slowly. To use it, {fla.REMEDY}.")
    missing = sorted(info["missing_keys"])
    if missing:
        extra = sorted(info["unexpected_keys"])
        hint = f"; there is {extra[0]}, which it has no place for" if extra else ""
        raise UserError(
            f"The weights of '{base}' lack {len(missing)} tensors, {missing[0]} first{hint}: fetch the model "
            "again, or give the config.json that belongs to these weights."
        )
    _check_tokenizer(base, tokenizer, model)
    unused = sorted({*info["unexpected_keys"], *(name for name in names if name.startswith("mtp."))})
    if unused:  # transformers leaves layers that predict several tokens out without a word
        logger.warning(
            f"{base} has {len(unused)} tensors that {type(model).__name__} has no place for, {unused[0]} "
            "first: a model that is trained from it is written without them."
        )
    return tokenizer, model


def has_vision(config: Any) -> bool:
    """Whether it is a text model inside one that sees images, as transformers has it."""
    from transformers import AutoModelForImageTextToText

    is_known = type(config) in AutoModelForImageTextToText._model_mapping
    return is_known and getattr(config, "vision_config", None) is not None


def model_class(config: Any) -> Any:
    """transformers' auto class: a text model inside another one is loaded, and so written, with all of it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def copy_processor(model: Any, folder: Path) -> None:
    """The settings of what turns images into inputs, from where the model was loaded."""
    from transformers.utils.hub import cached_file

    missing: Any = {"_raise_exceptions_for_missing_entries": False, "local_files_only": True}
    for name in PROCESSOR_FILES if has_vision(model.config) else ():
        path = cached_file(model.name_or_path, name, _raise_exceptions_for_connection_errors=False, **missing)
        if path is not None:
            shutil.copy(path, folder / name)


@contextlib.contextmanager
def guarded(base: str) -> Iterator[None]:
    """Whatever transformers makes of a broken folder becomes one sentence."""
    import torch

    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"The model '{base}' can't be loaded ({_reason(error)}): {REMEDY}.") from None


def _reason(error: BaseException) -> str:
    """The first line or two of what another package says, without what only its own users understand."""
    if isinstance(error, pickle.UnpicklingError):
        return "its pickled weights are damaged, or hold more than tensors"
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if "ignore_mismatched_sizes" in text:
        return "the weights have other shapes than config.json says"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])[:300].rstrip(".:")
    if isinstance(error, OSError | ValueError) and reason:
        return reason
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """What transformers would warn of is refused here, in our own words."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def verify_folder(folder: Path) -> None:
    """Compare a folder that we wrote with the checksums of its manifest; others have none."""
    if not (folder / NAME).exists():
        return
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
        wrong = damaged_files(folder, manifest, skip="state")
        if wrong:
            raise Damage(f"its file {wrong[0]} is damaged (the checksum differs)")
    except Damage as damage:
        raise UserError(
            f"The model folder {folder} can't be used, since {damage}: take another checkpoint, or delete "
            f"{folder / NAME} if you have changed the folder on purpose."
        ) from None


def check_weights(folder: Path) -> set[str]:
    """Look at config.json and the weight files without building anything, so that no nonsense is built.
    Returns the names of the tensors.
    """
    about = read_object(folder / "config.json")
    if (folder / "generation_config.json").exists():  # transformers would go on without: other stop tokens
        read_object(folder / "generation_config.json")
    shapes: dict[str, list[int]] = {}
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = {single.name} if single.is_file() else set()
    if not names and index.is_file():
        names = set(read_object(index)["weight_map"].values())
    for name in sorted(names):
        shapes |= _shapes(folder / name)
    text: dict[str, Any] = about["text_config"] if isinstance(about.get("text_config"), dict) else about
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    there = {int(match[1]) for name in shapes if (match := LAYER.search(name))}
    if type(layers) is int and there and not 0 < layers <= max(there) + 1:
        raise UserError(
            f"{folder / 'config.json'} says {layers} layers, but the weights hold {max(there) + 1}: give the "
            "config.json that belongs to these weights."
        )
    vocabulary, hidden = text.get("vocab_size"), text.get("hidden_size")
    for name, shape in shapes.items():
        stated = type(vocabulary) is int and type(hidden) is int and name.endswith("embed_tokens.weight")
        if stated and shape != [vocabulary, hidden]:
            raise UserError(
                f"{folder / 'config.json'} says {vocabulary} tokens x {hidden} values, but {name} is "
                f"{' x '.join(map(str, shape))}: give the config.json that belongs to these weights."
            )
    return set(shapes)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise UserError(f"{path} can't be read ({reason}): fetch the model again.") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no JSON object: fetch the model again.")
    return document


def check_index(index: Path) -> None:
    """Every file that an index of weights names is there, in its own folder."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise UserError(f"{index} has no weight_map of tensors to files: fetch the model again.")
    names = sorted(set(shards.values()))
    odd = [name for name in names if name != Path(name).name or name in ("", ".", "..")]
    if odd:
        raise UserError(f"{index} names {odd[0]!r}, which is no file of its folder: fetch the model again.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(
            f"The model folder {index.parent} lacks {len(missing)} of {len(names)} weight files, "
            f"{missing[0]} first: copy them there, or fetch the model again."
        )


def _shapes(path: Path) -> dict[str, list[int]]:
    """Names and shapes of a safetensors file; the library checks that its parts lie where they should."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged, or no safetensors file ({error}): fetch the model again."
        ) from None


def try_tokenizer(folder: Path) -> None:
    """Encode and decode a text in a limited process: a tokenizer.json can make a character millions, or match
    patterns for ever. It is read once in a process.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        reason = _tokenizer_problem(str(path.resolve()), path.stat().st_mtime_ns)
        if reason is not None:
            raise UserError(f"{path} can't be used ({reason}): fetch the model again.")


@functools.lru_cache(maxsize=64)
def _tokenizer_problem(path: str, _changed_at: int) -> str | None:
    answer = ask("tokenizer", TOKENIZER_S, TOKENIZER_MEMORY, path=path, text=TOKENIZER_TEXT)
    if answer is None:
        return f"it takes more than {TOKENIZER_S:g} s or {TOKENIZER_MEMORY >> 30} GB for a short text"
    return answer.get("error")


def _check_tokenizer(base: str, tokenizer: Any, model: Any) -> None:
    """The tokenizer reads and writes text, and every token that a prompt can hold has a row of weights."""
    rows = model.get_input_embeddings().weight.shape[0]
    with guarded(base):
        ids = tokenizer("1 + 2 = 3", add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(ids) if ids else ""
    if not text.strip():
        raise UserError(f"The tokenizer of '{base}' can't encode '1 + 2 = 3': give this model's own files.")
    added = tokenizer.get_added_vocab()
    template = str(tokenizer.chat_template or "")
    used = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if token not in added or token in template or number == tokenizer.eos_token_id
    }
    last = max(used, key=lambda token: used[token])
    if used[last] >= rows:
        raise UserError(
            f"The tokenizer of '{base}' has the token {last!r} as number {used[last]}, but the model has "
            f"weights for {rows} tokens only: give this model's own tokenizer files."
        )
