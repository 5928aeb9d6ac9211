"""Broken model folders, made from the embedded model: what a download, a copy or a hand can do to one.

`make(folder, name)` writes the folder of that name. `MODELS[name].exit_code` is what `whet train` must return
on it: 2, with one sentence and no traceback, or 0 where the folder looks odd but is sound. A plain module:
tests run a part of it, the campaign all of it in real processes.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PEBBLE = Path(__file__).resolve().parents[2] / "whetstone" / "model" / "pebble"


@dataclass(frozen=True, kw_only=True)
class Model:
    damage: Callable[[Path], None]
    exit_code: int = 2


def make(folder: Path, name: str) -> None:
    """Write the broken model `name` to `folder`, which must not exist."""
    shutil.copytree(PEBBLE, folder)
    MODELS[name].damage(folder)


# ---- ways to damage ----------------------------------------------------------------------------------------


def write(name: str, contents: bytes | str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)

    return damage


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return damage


def flip(name: str, place: int) -> Callable[[Path], None]:
    """All bits of one byte; counted from the end where negative."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 0xFF
        (folder / name).write_bytes(bytes(data))

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    """config.json with other values; None deletes a key."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        about = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """The weights, changed in place."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def template(text: str) -> Callable[[Path], None]:
    return write("chat_template.jinja", text)


def replace_by(name: str, kind: str) -> Callable[[Path], None]:
    """A file becomes a folder, a dangling link, or nothing."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if kind == "folder":
            (folder / name).mkdir()
        elif kind == "link":
            (folder / name).symlink_to(folder / "nowhere")

    return damage


def one(pattern: str, weights: dict[str, torch.Tensor]) -> str:
    """The first tensor whose name ends like that."""
    return next(name for name in sorted(weights) if name.endswith(pattern))


def drop(pattern: str) -> Callable[[Path], None]:
    return tensors(lambda weights: weights.pop(one(pattern, weights)))


def rename(pattern: str, new: str) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        name = one(pattern, weights)
        weights[name.replace(pattern, new)] = weights.pop(name)

    return tensors(change)


def resize(pattern: str, rows: int) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        name = one(pattern, weights)
        weights[name] = weights[name][:rows].clone()

    return tensors(change)


def fill(pattern: str, value: float) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[one(pattern, weights)].fill_(value)

    return tensors(change)


def index(document: Any) -> Callable[[Path], None]:
    """A sharded model: the weights under the name of a shard, with this index."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        text = document if isinstance(document, str) else json.dumps(document)
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def good_index(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    shard = "model-00001-of-00001.safetensors"
    index({"metadata": {}, "weight_map": dict.fromkeys(names, shard)})(folder)


class Touch:
    """Unpickled without care, it writes a file beside the weights."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


PROOF = "executed"  # must never appear in a model folder


def pickled(hostile: bool) -> Callable[[Path], None]:
    """pytorch_model.bin instead of safetensors: as torch writes it, or with code in it."""

    def damage(folder: Path) -> None:
        weights: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        if hostile:
            weights["code"] = Touch(folder / PROOF)
        torch.save(weights, folder / "pytorch_model.bin")

    return damage


def bare_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(folder / PROOF)))


def remote_code(folder: Path) -> None:
    """A model of its own kind, whose code lies in the folder."""
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config(model_type="own", architectures=["OwnModel"], auto_map=names)(folder)
    (folder / "own.py").write_text(f"open({str(folder / PROOF)!r}, 'w')\nclass OwnConfig: ...\n")


def adapter(base: str | None, weights: bytes | None = b"", **changes: Any) -> Callable[[Path], None]:
    """An adapter folder. `base`: SELF is the folder itself."""

    def damage(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        named = str(folder) if base == "SELF" else base
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": named, "r": 4}
        about |= {"target_modules": ["q_proj"], "lora_alpha": 8, **changes}
        (folder / "adapter_config.json").write_text(json.dumps(about))
        if weights is not None:
            (folder / "adapter_model.safetensors").write_bytes(weights)

    return damage


def foreign_adapter(folder: Path) -> None:
    """Weights of modules that the settings do not name."""
    adapter("pebble")(folder)
    stray = {"base_model.model.model.layers.0.mlp.other.lora_A.weight": torch.zeros(4, 8)}
    save_file(stray, folder / "adapter_model.safetensors")


def broken_adapter(folder: Path) -> None:
    adapter("pebble")(folder)
    (folder / "adapter_config.json").write_text("{")


def other_tokens(folder: Path) -> None:
    """A tokenizer with more tokens than the weights have rows."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    size = len(vocabulary)
    vocabulary |= {f"extra{number}": size + number for number in range(50)}
    path.write_text(json.dumps(document))


def tokenizer(**parts: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | parts))

    return damage


def replacements(times: int, old: str, new: str, kind: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": old}, "content": new}
    return {"type": "Sequence", f"{kind}s": [one] * times}


def no_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"] = {}
    document["added_tokens"] = []
    path.write_text(json.dumps(document))


NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
DROPS_SYSTEM = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"

MODELS: dict[str, Model] = {
    "weights cut off": Model(damage=cut("model.safetensors", 0.7)),
    "weights cut in the header": Model(damage=cut("model.safetensors", 0.0005)),
    "weights empty": Model(damage=write("model.safetensors", b"")),
    "weights garbage": Model(damage=write("model.safetensors", bytes(range(256)) * 400)),
    "weights text": Model(damage=write("model.safetensors", "oid sha256:4d7a214614ab2935c943f9e0ff69d22e\n")),
    "weights HTML": Model(damage=write("model.safetensors", "<html><body>404 Not Found</body></html>")),
    "weights with a flipped header length": Model(damage=flip("model.safetensors", 0)),
    "weights with a flipped header": Model(damage=flip("model.safetensors", 20)),
    "weights missing": Model(damage=replace_by("model.safetensors", "nothing")),
    "weights a folder": Model(damage=replace_by("model.safetensors", "folder")),
    "weights a dangling link": Model(damage=replace_by("model.safetensors", "link")),
    "weights without tensors": Model(damage=tensors(lambda weights: weights.clear())),
    "a tensor missing": Model(damage=drop("q_proj.weight")),
    "a norm missing": Model(damage=drop("model.norm.weight")),
    "the embedding missing": Model(damage=drop("embed_tokens.weight")),
    "a tensor renamed": Model(damage=rename("q_proj.weight", "query.weight")),
    "all tensors renamed": Model(
        damage=tensors(lambda w: [w.__setitem__(f"x.{name}", w.pop(name)) for name in list(w)])
    ),
    "a tensor of another shape": Model(damage=resize("k_proj.weight", 7)),
    "the embedding of another shape": Model(damage=resize("embed_tokens.weight", 50)),
    "weights that are NaN": Model(damage=fill("q_proj.weight", float("nan"))),
    "weights that are infinite": Model(damage=fill("down_proj.weight", float("inf"))),
    "config empty": Model(damage=write("config.json", "")),
    "config empty object": Model(damage=write("config.json", "{}")),
    "config a list": Model(damage=write("config.json", "[1, 2]")),
    "config null": Model(damage=write("config.json", "null")),
    "config garbage": Model(damage=write("config.json", b"\xff\xfe\x00garbage")),
    "config nested without end": Model(damage=write("config.json", '{"a":' * 100_000)),
    "config missing": Model(damage=replace_by("config.json", "nothing")),
    "config a folder": Model(damage=replace_by("config.json", "folder")),
    "config without model_type": Model(damage=config(model_type=None)),
    "config of an unknown model": Model(damage=config(model_type="never_heard_of")),
    "config of an encoder": Model(damage=config(model_type="bert")),
    "config with more layers": Model(damage=config(num_hidden_layers=64)),
    "config with a million layers": Model(damage=config(num_hidden_layers=1_000_000)),
    "config with no layers": Model(damage=config(num_hidden_layers=0)),
    "config with layers in words": Model(damage=config(num_hidden_layers="six")),
    "config with another width": Model(damage=config(hidden_size=96)),
    "config with a huge width": Model(damage=config(hidden_size=10**12)),
    "config with another inner width": Model(damage=config(intermediate_size=100)),
    "config with a huge inner width": Model(damage=config(intermediate_size=10**12)),
    "config with other heads": Model(damage=config(num_attention_heads=7)),
    "config with zero heads": Model(damage=config(num_attention_heads=0)),
    "config with another vocabulary": Model(damage=config(vocab_size=90)),
    "config with a negative vocabulary": Model(damage=config(vocab_size=-1)),
    "config with an unknown activation": Model(damage=config(hidden_act="no_such")),
    "config with a wrong rope": Model(damage=config(rope_parameters={"rope_type": "no_such"})),
    "untied without an output matrix": Model(damage=config(tie_word_embeddings=False)),
    "code in the folder": Model(damage=remote_code),
    "tokenizer empty": Model(damage=write("tokenizer.json", "")),
    "tokenizer empty object": Model(damage=write("tokenizer.json", "{}")),
    "tokenizer garbage": Model(damage=write("tokenizer.json", b"\x00\x01\x02")),
    "tokenizer cut off": Model(damage=cut("tokenizer.json", 0.5)),
    "tokenizer missing": Model(damage=replace_by("tokenizer.json", "nothing")),
    "tokenizer a folder": Model(damage=replace_by("tokenizer.json", "folder")),
    "tokenizer without tokens": Model(damage=no_tokens),
    "tokenizer of a larger vocabulary": Model(damage=other_tokens),
    "tokenizer that doubles a letter": Model(
        damage=tokenizer(normalizer=replacements(40, "e", "ee", "normalizer"))
    ),
    "tokenizer that writes too much": Model(
        damage=tokenizer(decoder=replacements(12, ".", 10 * ".", "decoder"))
    ),
    "tokenizer with an endless pattern": Model(
        damage=tokenizer(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": r"(\w+\s?)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    ),
    "tokenizer settings garbage": Model(damage=write("tokenizer_config.json", "{{{")),
    "tokenizer settings a list": Model(damage=write("tokenizer_config.json", "[]")),
    "generation settings garbage": Model(damage=write("generation_config.json", "]"), exit_code=2),
    "index garbage": Model(damage=index("not json")),
    "index without a map": Model(damage=index({"metadata": {}})),
    "index that is a list": Model(damage=index([])),
    "index with wrong types": Model(damage=index({"weight_map": {"a": 3}})),
    "index of files that are missing": Model(damage=index({"weight_map": {"a": "model-00002.safetensors"}})),
    "index that leaves the folder": Model(damage=index({"weight_map": {"a": "../../etc/passwd"}})),
    "index of other tensors": Model(damage=index({"weight_map": {"a": "model-00001-of-00001.safetensors"}})),
    "index that is right": Model(damage=good_index, exit_code=0),
    "pickle with code in it": Model(damage=pickled(hostile=True)),
    "pickle of code alone": Model(damage=bare_pickle),
    "pickle of weights": Model(damage=pickled(hostile=False), exit_code=0),
    "template that does not parse": Model(damage=template("{% for %}")),
    "template that raises": Model(damage=template("{{ raise_exception('never') }}")),
    "template that loops": Model(damage=template(NESTED + PLAIN)),
    "template that takes all memory": Model(damage=template("{{ 'a' * 10000000000 }}" + PLAIN)),
    "template without end": Model(damage=template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + PLAIN)),
    "template that writes too much": Model(damage=template("{{ 'aaaaaaaaaa' * 1000000 }}" + PLAIN)),
    "template that leaves the question out": Model(damage=template("Hello.")),
    "template that reaches for Python": Model(damage=template("{{ ''.__class__.__mro__ }}" + PLAIN)),
    "template with an unknown filter": Model(damage=template("{{ messages | no_such_filter }}" + PLAIN)),
    "template that divides by zero": Model(damage=template("{{ 1 / 0 }}" + PLAIN)),
    "template without a system role": Model(damage=template(NO_SYSTEM), exit_code=0),
    "template that drops the system message": Model(damage=template(DROPS_SYSTEM), exit_code=0),
    "adapter of itself": Model(damage=adapter("SELF")),
    "adapter without a base": Model(damage=adapter(None)),
    "adapter of nothing": Model(damage=adapter("./no/such/base")),
    "adapter with empty weights": Model(damage=adapter("pebble", b"")),
    "adapter with garbage for weights": Model(damage=adapter("pebble", b"garbage" * 100)),
    "adapter without weights": Model(damage=adapter("pebble", None)),
    "adapter of foreign modules": Model(damage=foreign_adapter),
    "adapter of an unknown kind": Model(damage=adapter("pebble", b"", peft_type="NO_SUCH")),
    "adapter settings garbage": Model(damage=broken_adapter),
}  # fmt: skip
