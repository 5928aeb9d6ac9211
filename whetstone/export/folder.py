"""Export: write a model folder that transformers, vLLM and llama.cpp load, complete or not at all."""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whetstone.errors import UserError
from whetstone.export.gguf import check_architecture, write_gguf
from whetstone.model.card import ADAPTER_CONFIG
from whetstone.model.hub import base_and_adapter, load_gguf
from whetstone.model.loading import (
    copy_processor,
    guarded,
    load_pretrained,
    quiet_transformers,
    try_tokenizer,
    verify_folder,
)
from whetstone.model.lora import merge_lora
from whetstone.model.manifest import Damage, read_manifest
from whetstone.model.nf4 import dequantize_model, quantize_model
from whetstone.model.rounding import stochastic_round
from whetstone.model.verification import TEXTS
from whetstone.report.card import write_card
from whetstone.run.atomic_folder import clear_temp, temp_dir
from whetstone.run.checkpoint import save_model
from whetstone.run.lock import RunLock
from whetstone.run.source import Source
from whetstone.terminal.stages import stage

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SHARD_SIZE = "5GB"
# Relative error of the logits. Measured: f16 5e-4, q8_0 2.3e-2 (SmolLM2-135M); 0 and 7e-3 (pebble).
BOUNDS = {"f16": 5e-3, "q8_0": 1e-1}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Logits of two models on the same tokens."""

    largest: float
    relative: float  # norm of the difference / norm of the logits


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    dtype: str  # bf16, f16 or f32
    files: dict[str, int]  # name -> bytes
    differences: dict[str, Difference]  # of GGUF files, from the logits in float32


def export(
    source: Source,
    output: Path | None = None,
    *,
    dtype: str | None = None,
    gguf: Sequence[str] = (),
    max_shard_size: str = SHARD_SIZE,
    verify: bool = True,
) -> Exported:
    """Write `source` as one ordinary model; `dtype` None: the precision that it was stored in."""
    folder = _output_folder(source, output)
    _check_shard_size(max_shard_size)
    is_inside = source.run is not None and source.run.resolve() in folder.resolve().parents
    elsewhere = "wait until it ends, or write elsewhere with --output DIR"
    with RunLock(source.run, remedy=elsewhere) if source.run and is_inside else contextlib.nullcontext():
        return _export(source, folder, dtype, gguf, max_shard_size, verify=verify)


def _export(
    source: Source, folder: Path, dtype: str | None, gguf: Sequence[str], max_shard_size: str, *, verify: bool
) -> Exported:
    with stage("loading the model"):
        tokenizer, model, stored = load_merged(source)
    is_merged = (Path(source.model) / ADAPTER_CONFIG).is_file()
    if gguf:
        check_architecture(model.config)
        model.float()
    target = DTYPES[dtype] if dtype else stored
    short = _short_name(target)
    differences: dict[str, Difference] = {}

    def write(aside: Path) -> None:
        for kind in dict.fromkeys(gguf):
            path = aside / f"{_file_name(source.title)}-{kind}.gguf"
            with stage(f"writing {path.name}"):
                write_gguf(path, model, tokenizer, kind=kind, name=source.title, is_merged=is_merged)
            if verify:
                with stage(f"comparing {path.name}"):
                    differences[path.name] = compare_gguf(path, model, tokenizer, kind)
        with stage("writing the model"):
            _convert(model, target, is_merged=is_merged)
            _save(aside, model, tokenizer, max_shard_size)
            write_card(
                aside,
                source.run,
                step=source.step,
                source=Path(source.model),
                name=folder.name,
                title=source.title,
                notes=_notes(source, _short_name(stored), short, differences),
                gguf=[path.name for path in sorted(aside.glob("*.gguf"))],
            )

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_model(write, folder, source.step)
    except OSError as error:
        raise UserError(
            f"{folder} can't be written ({error.strerror or error}): free some space, or choose another "
            "folder with --output."
        ) from None
    finally:
        clear_temp(temp_dir(folder, "writing"))  # of an export that failed
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return Exported(folder=folder, dtype=short, files=files, differences=differences)


def _convert(model: Any, dtype: torch.dtype, *, is_merged: bool) -> None:
    for parameter in model.parameters():  # buffers keep their precision: a router's bias is float32
        parameter.data = stochastic_round(parameter.data, dtype) if is_merged else parameter.data.to(dtype)


def _save(folder: Path, model: Any, tokenizer: Any, max_shard_size: str) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        raise UserError("Some weights are not finite in this precision: use --dtype bf16 or f32.")
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    except ValueError as error:  # transformers refuses settings of generate that it loads
        reason = (str(error).strip().splitlines() or ["ValueError"])[0][:200].rstrip(".:")
        raise UserError(f"The model can't be saved ({reason}): repair its generation_config.json.") from None
    tokenizer.save_pretrained(folder)
    copy_processor(model, folder)


def _output_folder(source: Source, output: Path | None) -> Path:
    """Where to write; an existing folder is replaced only where it is an export."""
    if output is None:
        if source.run is None:
            raise UserError(f"{source.model} belongs to no run: say where to write it with --output DIR.")
        model = Path(source.model).name
        return source.run / ("export" if source.is_final else f"export-{model}")
    folder = Path(output).expanduser().absolute()
    if folder.is_dir() and any(folder.iterdir()):
        try:
            read_manifest(folder)
        except Damage:
            raise UserError(f"{output} is not empty: give a new folder with --output DIR.") from None
        model = Path(source.model).absolute()
        if folder in (model, *model.parents) or (folder / "state").exists():
            raise UserError(f"{output} holds what is exported, or a checkpoint: give another --output DIR.")
    elif folder.is_dir():
        folder.rmdir()
    elif folder.exists():
        raise UserError(f"{output} is a file: give a new folder with --output DIR.")
    return folder


def _check_shard_size(text: str) -> None:
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?[KMGT]i?B", text, flags=re.IGNORECASE)
    if number is None or float(number[1]) == 0 or not math.isfinite(float(number[1])):
        raise UserError(f"--max-shard-size '{text[:50]}' is no size: write 5GB or 500MB.")


def _short_name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name) or "model"


def _notes(source: Source, stored: str, dtype: str, differences: dict[str, Difference]) -> list[str]:
    """What a reader must know of this copy of the weights."""
    notes = []
    if (Path(source.model) / ADAPTER_CONFIG).is_file():
        notes.append(
            f"The adapter was merged in float32, and the sum rounded to {dtype} once, stochastically. What "
            "was measured is the adapter beside its base."
        )
        if source.was_4bit:
            notes.append("It was trained on its base in 4 bits (NF4): these weights hold the rounded base.")
    elif dtype != stored:
        notes.append(f"The weights were rounded from {stored} to {dtype}. What was measured is {stored}.")
    notes += [
        f"`{name}`: on a few sentences, its logits differ from those of the weights in float32 by at most "
        f"{difference.largest:.2g} (relative error {difference.relative:.1e})."
        for name, difference in differences.items()
    ]
    return notes


def load_merged(source: Source) -> tuple[Any, Any, torch.dtype]:
    """Tokenizer, model, and the precision that the weights were stored in.

    Adapters are added in float32: the sum is rounded once, when it is saved.
    """
    base, adapter = base_and_adapter(source.model)
    for folder in (base, adapter):
        if folder is not None and Path(folder).is_dir():
            verify_folder(Path(folder))
    tokenizer, model = load_pretrained(base, "auto")
    stored = model.dtype
    if adapter is not None:
        if source.was_4bit:  # training added the adapter to the rounded matrices, so these are merged
            model.to(torch.bfloat16 if source.was_bf16 else torch.float32)
            quantize_model(model, torch.device("cpu"))
            dequantize_model(model)
        model = merge_lora(model.float(), adapter)
        tokenizer = _own_tokenizer(adapter) or tokenizer
    return tokenizer, model.requires_grad_(False).eval(), stored


def _own_tokenizer(adapter: str) -> Any:
    """The tokenizer beside an adapter, with the chat template of its run; None: there is none."""
    from transformers import AutoTokenizer

    if not (Path(adapter) / "tokenizer_config.json").is_file():
        return None
    try_tokenizer(Path(adapter))
    with quiet_transformers(), guarded(adapter):
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)


def compare_gguf(path: Path, model: Any, tokenizer: Any, kind: str) -> Difference:
    """The difference of a GGUF file from the float32 model it was written from; raises beyond the bound."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        # transformers reads no key_length of Qwen 3 and takes 128.
        is_qwen3 = model.config.model_type == "qwen3"
        other = load_gguf(path, **({"head_dim": model.config.head_dim} if is_qwen3 else {}))
        other_tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    own, other_logits = [], []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if other_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise UserError(f"{path.name} reads text as other tokens: export without --gguf.")
        with torch.no_grad():
            own.append(model(torch.tensor([ids])).logits[0])
            other_logits.append(other(torch.tensor([ids])).logits[0])
    difference = logit_difference(torch.cat(other_logits), torch.cat(own))
    if not difference.relative < BOUNDS[kind]:
        raise UserError(
            f"{path.name} computes other logits (relative error {difference.relative:.1e}, more than "
            f"{BOUNDS[kind]:g}): export without --gguf."
        )
    return difference


def logit_difference(logits: torch.Tensor, own: torch.Tensor) -> Difference:
    gap = logits.float() - own.float()
    return Difference(largest=float(gap.abs().max()), relative=float(gap.norm() / own.float().norm()))
