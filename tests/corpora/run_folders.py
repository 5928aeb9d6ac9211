"""Damaged run folders: what a disk, a kill, a copy or a hand can do to one, and what must happen then.

A run folder is that of a small run with checkpoint-1, -2 and -3 (`save_steps=1 max_steps=3`), finished.
`DAMAGES[name].damage(folder)` damages it. Then the run is resumed with `auto_resume=true`, and:

- `outcome` "resumed": exit code 0, and `final_model` equals the undamaged run's bit for bit;
- `outcome` "refused": exit code 2, one sentence on stderr that holds `names`, no traceback;
- `kept`: paths (globs beneath the folder) that must exist afterwards: nothing of the user's is deleted;
- `step`: the checkpoint it must resume from, where that is not the newest.

A plain module: tests run a part of it, the campaign all of it in real processes.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whetstone.model.manifest import write_manifest

Damage = Callable[[Path], None]
NEWEST = "checkpoint-3"
PROOF = "executed"  # must never appear in a run folder


@dataclass(frozen=True, kw_only=True)
class Case:
    damage: Damage
    outcome: str = "resumed"  # or "refused"
    names: tuple[str, ...] = ()  # what the output must mention
    kept: tuple[str, ...] = ()
    step: int | None = None  # the checkpoint to resume from; None: the newest


# ---- ways to damage ----------------------------------------------------------------------------------------


def flip(name: str, share: float = 0.5) -> Damage:
    """One bit of a file, at that share of its length."""

    def damage(folder: Path) -> None:
        path = folder / name
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(min(size - 1, int(size * share)))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    return damage


def cut(name: str, share: float = 0.5) -> Damage:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def grow(name: str) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(b"\0" * 100)

    return damage


def write(name: str, contents: bytes | str) -> Damage:
    data = contents.encode() if isinstance(contents, str) else contents

    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return damage


def remove(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def become(name: str, kind: str) -> Damage:
    """A file or folder becomes something else of its name: folder, file, dangling or looping link, pipe."""

    def damage(folder: Path) -> None:
        path = folder / name
        if os.path.lexists(path):
            remove(name)(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir()
            (path / "precious.txt").write_text("precious")
        elif kind == "file":
            path.write_text("precious")
        elif kind == "dangling link":
            path.symlink_to(folder / "nowhere")
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "pipe":
            os.mkfifo(path)

    return damage


def copy(source: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        if (folder / source).is_dir():
            shutil.rmtree(folder / target, ignore_errors=True)
            shutil.copytree(folder / source, folder / target)
        else:
            shutil.copyfile(folder / source, folder / target)

    return damage


def manifest(change: Callable[[dict[str, Any]], Any], name: str = NEWEST) -> Damage:
    """The manifest of a checkpoint with a change in it, still JSON."""

    def damage(folder: Path) -> None:
        path = folder / name / "whetstone.json"
        document = json.loads(path.read_text())
        changed = change(document)
        path.write_text(json.dumps(document if changed is None else changed))

    return damage


def append(name: str, text: str | bytes) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    return damage


def insert_line(name: str, text: str | bytes) -> Damage:
    """As the first line."""

    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes((text.encode() if isinstance(text, str) else text) + b"\n" + data)

    return damage


def both(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage


def every_checkpoint(each: Callable[[str], Damage]) -> Damage:
    return both(*(each(f"checkpoint-{step}") for step in (1, 2, 3)))


class Touch:
    """Unpickled without care, it writes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def hostile(name: str) -> Damage:
    """A pickle with code in it, under a manifest that says it is right: somebody else's checkpoint."""

    def damage(folder: Path) -> None:
        for step in (1, 2, 3):
            checkpoint = folder / f"checkpoint-{step}"
            payload = Touch(folder / PROOF)
            if name == "scalars.pt":
                torch.save({"updater": payload}, checkpoint / name)
            else:
                (checkpoint / name).write_bytes(pickle.dumps(payload))
            reseal(checkpoint)

    return damage


def reseal(checkpoint: Path) -> None:
    """A manifest for the files as they are now."""
    write_manifest(checkpoint, step=json.loads((checkpoint / "whetstone.json").read_text())["step"])


def link_outside(folder: Path) -> None:
    """checkpoint-3 has moved to another disk and is a link now."""
    elsewhere = folder.with_name(f"{folder.name}-elsewhere")
    (folder / NEWEST).rename(elsewhere)
    (folder / NEWEST).symlink_to(elsewhere)


STATE = f"{NEWEST}/state/__0_0.distcp"
MODEL = f"{NEWEST}/model.safetensors"
HUGE = '{"step": 1' + "0" * 6000 + ', "kind": "train"}'
ASIDE = (f"{NEWEST}.damaged*",)


def fallen_back(damage: Damage, *names: str) -> Case:
    """checkpoint-3 is damaged: the run goes on from checkpoint-2 and says so."""
    return Case(damage=damage, names=(NEWEST, *names), kept=ASIDE, step=2)


DAMAGES: dict[str, Case] = {
    "nothing": Case(damage=lambda folder: None),
    # contents of the newest checkpoint
    "a bit of the state flipped": fallen_back(flip(STATE), "__0_0.distcp"),
    "the first bit of the state flipped": fallen_back(flip(STATE, 0), "__0_0.distcp"),
    "the last bit of the state flipped": fallen_back(flip(STATE, 1), "__0_0.distcp"),
    "a bit of the weights flipped": fallen_back(flip(MODEL), "model.safetensors"),
    "a bit of the weights' header flipped": fallen_back(flip(MODEL, 0.001), "model.safetensors"),
    "a bit of .metadata flipped": fallen_back(flip(f"{NEWEST}/state/.metadata"), ".metadata"),
    "a bit of scalars.pt flipped": fallen_back(flip(f"{NEWEST}/scalars.pt"), "scalars.pt"),
    "a bit of config.json flipped": fallen_back(flip(f"{NEWEST}/config.json"), "config.json"),
    "a bit of tokenizer.json flipped": fallen_back(flip(f"{NEWEST}/tokenizer.json"), "tokenizer.json"),
    "a bit of the manifest flipped": fallen_back(flip(f"{NEWEST}/whetstone.json"), "whetstone.json"),
    "the state cut off": fallen_back(cut(STATE), "__0_0.distcp"),
    "the state empty": fallen_back(cut(STATE, 0), "__0_0.distcp"),
    "the state longer": fallen_back(grow(STATE), "__0_0.distcp"),
    "the state missing": fallen_back(remove(STATE), "__0_0.distcp"),
    "the folder of the state missing": fallen_back(remove(f"{NEWEST}/state"), "state"),
    "the weights cut off": fallen_back(cut(MODEL, 0.9), "model.safetensors"),
    "the weights empty": fallen_back(write(MODEL, b""), "model.safetensors"),
    "the weights a folder": fallen_back(become(MODEL, "folder"), "model.safetensors"),
    "the weights a dangling link": fallen_back(become(MODEL, "dangling link"), "model.safetensors"),
    "the weights a pipe": fallen_back(become(MODEL, "pipe"), "model.safetensors"),
    "scalars.pt garbage": fallen_back(write(f"{NEWEST}/scalars.pt", "garbage"), "scalars.pt"),
    "scalars.pt missing": fallen_back(remove(f"{NEWEST}/scalars.pt"), "scalars.pt"),
    "the tokenizer missing": fallen_back(remove(f"{NEWEST}/tokenizer.json"), "tokenizer.json"),
    "the state of another step": fallen_back(copy("checkpoint-2/state", f"{NEWEST}/state"), "state"),
    "the weights of another step": fallen_back(copy("checkpoint-2/model.safetensors", MODEL), "model"),
    "numbers of another step": fallen_back(
        copy("checkpoint-2/scalars.pt", f"{NEWEST}/scalars.pt"), "scalars"
    ),
    "the manifest of another step": fallen_back(
        copy("checkpoint-2/whetstone.json", f"{NEWEST}/whetstone.json"), "step 2"
    ),
    "all of another step": fallen_back(copy("checkpoint-2", NEWEST), "step 2"),
    # the manifest
    **{
        f"the manifest {text!r}": fallen_back(write(f"{NEWEST}/whetstone.json", text), "whetstone.json")
        for text in ("{}", "[]", "null", "3", "", "true", '"text"', "{", '{"step": 99, "files": {}}')
    },
    "the manifest not UTF-8": fallen_back(
        write(f"{NEWEST}/whetstone.json", b"\xff\xfe\x00"), "whetstone.json"
    ),
    "the manifest a folder": fallen_back(become(f"{NEWEST}/whetstone.json", "folder"), "whetstone.json"),
    "the manifest a looping link": fallen_back(become(f"{NEWEST}/whetstone.json", "loop"), "whetstone.json"),
    "the manifest missing": fallen_back(remove(f"{NEWEST}/whetstone.json"), "whetstone.json"),
    "the manifest nested without end": fallen_back(
        write(f"{NEWEST}/whetstone.json", '{"step": 3, "files": ' + "[" * 100_000), "whetstone.json"
    ),
    "the manifest with a step in words": fallen_back(manifest(lambda m: m.update(step="three")), "whetstone"),
    "the manifest with a negative step": fallen_back(manifest(lambda m: m.update(step=-3)), "whetstone"),
    "the manifest with a true step": fallen_back(manifest(lambda m: m.update(step=True)), "whetstone"),
    "the manifest with another step": fallen_back(manifest(lambda m: m.update(step=2)), "whetstone"),
    "the manifest with files in a list": fallen_back(
        manifest(lambda m: m.update(files=list(m["files"]))), "whetstone"
    ),
    "the manifest with a file left out": fallen_back(
        manifest(lambda m: m["files"].pop("scalars.pt") and None), "whetstone"
    ),
    "the manifest with a path outside": fallen_back(
        manifest(lambda m: m["files"].update({"../../secret": 1})), "whetstone"
    ),
    "the manifest of huge digits": fallen_back(
        write(f"{NEWEST}/whetstone.json", '{"step": 1' + "0" * 6000 + "}"), "whetstone"
    ),
    # the checkpoint folders themselves
    "checkpoint-4 a file": Case(damage=become("checkpoint-4", "file"), kept=("checkpoint-4*",)),
    "checkpoint-4 a folder": Case(
        damage=become("checkpoint-4", "folder"), kept=("checkpoint-4*/precious.txt",)
    ),
    "checkpoint-4 a dangling link": Case(
        damage=become("checkpoint-4", "dangling link"), kept=("checkpoint-4*",)
    ),
    "checkpoint-4 a looping link": Case(damage=become("checkpoint-4", "loop"), kept=("checkpoint-4*",)),
    "checkpoint-3 a file": Case(damage=become(NEWEST, "file"), kept=ASIDE, step=2),
    "checkpoint-3 empty": Case(
        damage=become(NEWEST, "folder"), kept=("checkpoint-3.*/precious.txt",), step=2
    ),
    "checkpoint-3 a link to itself": Case(damage=link_outside, kept=(NEWEST,)),
    "two newest damaged": Case(
        damage=both(flip(STATE), flip("checkpoint-2/scalars.pt")),
        names=(NEWEST, "checkpoint-2"),
        kept=("checkpoint-3.damaged", "checkpoint-2.damaged"),
        step=1,
    ),
    "all damaged": Case(
        damage=every_checkpoint(lambda name: flip(f"{name}/scalars.pt")),
        outcome="refused",
        names=("checkpoint-1", "scalars.pt"),
        kept=("checkpoint-1", "checkpoint-2", NEWEST),
    ),
    "scalars.pt with code in it": Case(
        damage=hostile("scalars.pt"), outcome="refused", names=("scalars.pt",)
    ),
    ".metadata with code in it": Case(
        damage=hostile("state/.metadata"), outcome="refused", names=(".metadata",)
    ),
    # temporary names
    "a checkpoint half written": Case(damage=copy("checkpoint-1", ".checkpoint-4.writing")),
    "a checkpoint half deleted": Case(damage=copy("checkpoint-1", ".checkpoint-1.deleting")),
    "a temporary checkpoint a file": Case(
        damage=become(".checkpoint-3.writing", "file"), kept=("*writing*",)
    ),
    "a temporary checkpoint a link": Case(
        damage=become(".checkpoint-3.writing", "loop"), kept=("*writing*",)
    ),
    "a temporary model a file": Case(
        damage=become(".final_model.writing", "file"), kept=("*final_model.wri*",)
    ),
    "a temporary metrics a folder": Case(
        damage=become(".metrics.jsonl.part", "folder"), kept=("metrics.jsonl.part*/precious.txt",)
    ),
    "a temporary config a folder": Case(
        damage=become(".config.yaml.part", "folder"), kept=("config.yaml.part*/precious.txt",)
    ),
    "a temporary result a link": Case(
        damage=become(".train_results.json.part", "loop"), kept=("train_res*part*",)
    ),
    # the run's other files
    "training.log a folder": Case(
        damage=become("training.log", "folder"),
        names=("training.log",),
        kept=("training.log.*/precious.txt",),
    ),
    "training.log a pipe": Case(damage=become("training.log", "pipe"), kept=("training.log.aside",)),
    "training.log a looping link": Case(damage=become("training.log", "loop"), kept=("training.log.aside",)),
    "training.log garbage": Case(damage=write("training.log", bytes(range(256)) * 10)),
    "metrics.jsonl a folder": Case(
        damage=become("metrics.jsonl", "folder"), kept=("metrics.jsonl.aside/precious.txt",)
    ),
    "metrics.jsonl a pipe": Case(damage=become("metrics.jsonl", "pipe"), kept=("metrics.jsonl.aside",)),
    "metrics.jsonl missing": Case(damage=remove("metrics.jsonl")),
    "metrics.jsonl garbage": Case(
        damage=write("metrics.jsonl", bytes(range(256)) * 10), kept=("metrics.jsonl.damaged",)
    ),
    "metrics.jsonl cut in a line": Case(damage=cut("metrics.jsonl", 0.97)),
    "metrics.jsonl with a huge step": Case(
        damage=insert_line("metrics.jsonl", HUGE), names=("metrics.jsonl",), kept=("metrics.jsonl.damaged",)
    ),
    "metrics.jsonl with a large step": Case(
        damage=insert_line(
            "metrics.jsonl", '{"step": 1000000000000000000000, "kind": "train", "reward": 1.0}'
        ),
        kept=("metrics.jsonl.damaged",),
    ),
    "metrics.jsonl with text for numbers": Case(
        damage=insert_line("metrics.jsonl", '{"step": 1, "kind": "train", "reward": "high"}'),
        kept=("metrics.jsonl.damaged",),
    ),
    "metrics.jsonl nested without end": Case(
        damage=insert_line("metrics.jsonl", "[" * 100_000), kept=("metrics.jsonl.damaged",)
    ),
    "metrics.jsonl not UTF-8": Case(
        damage=insert_line("metrics.jsonl", b"\xff\xfe"), kept=("metrics.jsonl.damaged",)
    ),
    "config.yaml broken": Case(
        damage=write("config.yaml", "a: [1, 2"), names=("config.yaml",), kept=("config.yaml.damaged",)
    ),
    "config.yaml garbage": Case(damage=write("config.yaml", b"\xff\x00\x01"), kept=("config.yaml.damaged",)),
    "config.yaml empty": Case(damage=write("config.yaml", ""), kept=("config.yaml.damaged",)),
    "config.yaml a list": Case(damage=write("config.yaml", "- 1\n- 2\n"), kept=("config.yaml.damaged",)),
    "config.yaml with an object": Case(
        damage=write("config.yaml", "!!python/object/apply:os.system ['touch executed']"),
        kept=("config.yaml.damaged",),
    ),
    "config.yaml a folder": Case(
        damage=become("config.yaml", "folder"), kept=("config.yaml.*/precious.txt",)
    ),
    "config.yaml missing": Case(damage=remove("config.yaml")),
    "eval_step_0.json broken": Case(damage=cut("eval_results/eval_step_0.json")),
    "eval_step_0.json empty": Case(damage=write("eval_results/eval_step_0.json", "")),
    "eval_step_0.json null": Case(damage=write("eval_results/eval_step_0.json", "null")),
    "eval_step_0.json wrong types": Case(
        damage=write("eval_results/eval_step_0.json", '{"step": "x", "summary": [], "completions": 3}')
    ),
    "eval_step_0.json not UTF-8": Case(damage=write("eval_results/eval_step_0.json", b"\xff\xfe\xfd")),
    "eval_step_0.json a folder": Case(damage=become("eval_results/eval_step_0.json", "folder")),
    "eval_step_0.json missing": Case(damage=remove("eval_results/eval_step_0.json")),
    "eval_results a file": Case(damage=become("eval_results", "file"), kept=("eval_results.aside",)),
    "completions a file": Case(damage=become("completions", "file"), kept=("completions.aside",)),
    "train_results.json a folder": Case(
        damage=become("train_results.json", "folder"), kept=("train_results.json.aside/precious.txt",)
    ),
    "report.html a folder": Case(
        damage=become("report.html", "folder"), kept=("report.html.aside/precious.txt",)
    ),
    # the final model
    "final_model missing": Case(damage=remove("final_model")),
    "final_model damaged": Case(damage=flip("final_model/model.safetensors"), kept=("final_model.aside",)),
    "final_model with a file of the user's": Case(
        damage=write("final_model/notes.txt", "precious"), kept=("final_model.aside/notes.txt",)
    ),
    "final_model a file": Case(damage=become("final_model", "file"), kept=("final_model.aside",)),
    "final_model a link": Case(damage=become("final_model", "dangling link"), kept=("final_model.asid*",)),
}
