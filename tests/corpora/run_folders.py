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


STATE, MODEL = "state/__0_0.distcp", "model.safetensors"
SCALARS, MANIFEST, METRICS, CONFIG = "scalars.pt", "whetstone.json", "metrics.jsonl", "config.yaml"
EVALUATION = "eval_results/eval_step_0.json"
HUGE = "1" + "0" * 6000


def fallen_back(damage: Damage, *names: str) -> Case:
    """checkpoint-3 is damaged: the run goes on from checkpoint-2 and says so."""
    return Case(damage=damage, names=(NEWEST, *names), kept=(f"{NEWEST}.damaged*",), step=2)


def newest(damage: Callable[..., Damage], name: str, *how: Any) -> Case:
    """A file of checkpoint-3 is damaged: the note names it."""
    return fallen_back(damage(f"{NEWEST}/{name}", *how), name.rpartition("/")[2])


def of_step_2(name: str, *names: str) -> Case:
    return fallen_back(copy(f"checkpoint-2/{name}", f"{NEWEST}/{name}"), *names or (name,))


def manifest_with(**changes: Any) -> Case:
    return fallen_back(manifest(lambda document: document.update(changes)), "whetstone")


def replaced(name: str, kind: str, kept: str = "{}.aside") -> Case:
    """Something else has the name of a file: it is set aside, with what is in it."""
    inside = "/precious.txt" if kind == "folder" else ""
    return Case(damage=become(name, kind), kept=(kept.format(name) + inside,))


def set_aside(damage: Damage, name: str, *names: str) -> Case:
    return Case(damage=damage, names=names, kept=(f"{name}.damaged",))


def bad_line(text: str | bytes, *names: str) -> Case:
    return set_aside(insert_line(METRICS, text), METRICS, *names)


DAMAGES: dict[str, Case] = {
    "nothing": Case(damage=lambda folder: None),
    # contents of the newest checkpoint
    "a bit of the state flipped": newest(flip, STATE),
    "the first bit of the state flipped": newest(flip, STATE, 0),
    "the last bit of the state flipped": newest(flip, STATE, 1),
    "a bit of the weights flipped": newest(flip, MODEL),
    "a bit of the weights' header flipped": newest(flip, MODEL, 0.001),
    "a bit of .metadata flipped": newest(flip, "state/.metadata"),
    **{
        f"a bit of {name} flipped": newest(flip, name)
        for name in (SCALARS, "config.json", "tokenizer.json", MANIFEST)
    },
    "the state cut off": newest(cut, STATE),
    "the state empty": newest(cut, STATE, 0),
    "the state longer": newest(grow, STATE),
    "the state missing": newest(remove, STATE),
    "the folder of the state missing": newest(remove, "state"),
    "the weights cut off": newest(cut, MODEL, 0.9),
    "the weights empty": newest(write, MODEL, b""),
    **{f"the weights a {kind}": newest(become, MODEL, kind) for kind in ("folder", "dangling link", "pipe")},
    "scalars.pt garbage": newest(write, SCALARS, "garbage"),
    "scalars.pt missing": newest(remove, SCALARS),
    "the tokenizer missing": newest(remove, "tokenizer.json"),
    "the state of another step": of_step_2("state"),
    "the weights of another step": of_step_2(MODEL, "model"),
    "numbers of another step": of_step_2(SCALARS, "scalars"),
    "the manifest of another step": of_step_2(MANIFEST, "step 2"),
    "all of another step": fallen_back(copy("checkpoint-2", NEWEST), "step 2"),
    # the manifest
    **{
        f"the manifest {text!r}": newest(write, MANIFEST, text)
        for text in ("{}", "[]", "null", "3", "", "true", '"text"', "{", '{"step": 99, "files": {}}')
    },
    "the manifest not UTF-8": newest(write, MANIFEST, b"\xff\xfe\x00"),
    "the manifest a folder": newest(become, MANIFEST, "folder"),
    "the manifest a looping link": newest(become, MANIFEST, "loop"),
    "the manifest missing": newest(remove, MANIFEST),
    "the manifest nested without end": newest(write, MANIFEST, '{"step": 3, "files": ' + "[" * 100_000),
    "the manifest with a step in words": manifest_with(step="three"),
    "the manifest with a negative step": manifest_with(step=-3),
    "the manifest with a true step": manifest_with(step=True),
    "the manifest with another step": manifest_with(step=2),
    "the manifest with files in a list": manifest_with(files=[MODEL, SCALARS]),
    "the manifest with a file left out": fallen_back(
        manifest(lambda m: m["files"].pop(SCALARS) and None), "whetstone"
    ),
    "the manifest with a path outside": fallen_back(
        manifest(lambda m: m["files"].update({"../../secret": 1})), "whetstone"
    ),
    "the manifest of huge digits": newest(write, MANIFEST, f'{{"step": {HUGE}}}'),
    # the checkpoint folders themselves
    **{
        f"checkpoint-4 a {name}": replaced("checkpoint-4", kind, "{}*")
        for name, kind in (
            ("file", "file"),
            ("folder", "folder"),
            ("dangling link", "dangling link"),
            ("looping link", "loop"),
        )
    },
    "checkpoint-3 a file": fallen_back(become(NEWEST, "file")),
    "checkpoint-3 empty": Case(
        damage=become(NEWEST, "folder"), kept=("checkpoint-3.*/precious.txt",), step=2
    ),
    "checkpoint-3 a link to itself": Case(damage=link_outside, kept=(NEWEST,)),
    "two newest damaged": Case(
        damage=both(flip(f"{NEWEST}/{STATE}"), flip("checkpoint-2/scalars.pt")),
        names=(NEWEST, "checkpoint-2"),
        kept=("checkpoint-3.damaged", "checkpoint-2.damaged"),
        step=1,
    ),
    "all damaged": Case(
        damage=every_checkpoint(lambda name: flip(f"{name}/scalars.pt")),
        outcome="refused",
        names=("checkpoint-1", SCALARS),
        kept=("checkpoint-1", "checkpoint-2", NEWEST),
    ),
    "scalars.pt with code in it": Case(damage=hostile(SCALARS), outcome="refused", names=(SCALARS,)),
    ".metadata with code in it": Case(
        damage=hostile("state/.metadata"), outcome="refused", names=(".metadata",)
    ),
    # temporary names
    "a checkpoint half written": Case(damage=copy("checkpoint-1", ".checkpoint-4.writing")),
    "a checkpoint half deleted": Case(damage=copy("checkpoint-1", ".checkpoint-1.deleting")),
    "a temporary checkpoint a file": replaced(".checkpoint-3.writing", "file", "*writing*"),
    "a temporary checkpoint a link": replaced(".checkpoint-3.writing", "loop", "*writing*"),
    "a temporary model a file": replaced(".final_model.writing", "file", "*final_model.wri*"),
    "a temporary metrics a folder": replaced(".metrics.jsonl.part", "folder", "metrics.jsonl.part*"),
    "a temporary config a folder": replaced(".config.yaml.part", "folder", "config.yaml.part*"),
    "a temporary result a link": replaced(".train_results.json.part", "loop", "train_res*part*"),
    # the run's other files
    "training.log a folder": Case(
        damage=become("training.log", "folder"),
        names=("training.log",),
        kept=("training.log.*/precious.txt",),
    ),
    "training.log a pipe": replaced("training.log", "pipe"),
    "training.log a looping link": replaced("training.log", "loop"),
    "training.log garbage": Case(damage=write("training.log", bytes(range(256)) * 10)),
    "metrics.jsonl a folder": replaced(METRICS, "folder"),
    "metrics.jsonl a pipe": replaced(METRICS, "pipe"),
    "metrics.jsonl missing": Case(damage=remove(METRICS)),
    "metrics.jsonl garbage": set_aside(write(METRICS, bytes(range(256)) * 10), METRICS),
    "metrics.jsonl cut in a line": Case(damage=cut(METRICS, 0.97)),
    "metrics.jsonl with a huge step": bad_line(f'{{"step": {HUGE}, "kind": "train"}}', METRICS),
    "metrics.jsonl with a large step": bad_line(
        '{"step": 1000000000000000000000, "kind": "train", "reward": 1.0}'
    ),
    "metrics.jsonl with text for numbers": bad_line('{"step": 1, "kind": "train", "reward": "high"}'),
    "metrics.jsonl nested without end": bad_line("[" * 100_000),
    "metrics.jsonl not UTF-8": bad_line(b"\xff\xfe"),
    **{
        f"config.yaml {name}": set_aside(write(CONFIG, text), CONFIG, *names)
        for name, text, *names in (
            ("broken", "a: [1, 2", CONFIG),
            ("garbage", b"\xff\x00\x01"),
            ("empty", ""),
            ("a list", "- 1\n- 2\n"),
            ("with an object", "!!python/object/apply:os.system ['touch executed']"),
        )
    },
    "config.yaml a folder": replaced(CONFIG, "folder", "{}.*"),
    "config.yaml missing": Case(damage=remove(CONFIG)),
    **{
        f"eval_step_0.json {name}": Case(damage=damage)
        for name, damage in (
            ("broken", cut(EVALUATION)),
            ("empty", write(EVALUATION, "")),
            ("null", write(EVALUATION, "null")),
            ("wrong types", write(EVALUATION, '{"step": "x", "summary": [], "completions": 3}')),
            ("not UTF-8", write(EVALUATION, b"\xff\xfe\xfd")),
            ("a folder", become(EVALUATION, "folder")),
            ("missing", remove(EVALUATION)),
        )
    },
    "eval_results a file": replaced("eval_results", "file"),
    "completions a file": replaced("completions", "file"),
    "train_results.json a folder": replaced("train_results.json", "folder"),
    "report.html a folder": replaced("report.html", "folder"),
    # the final model
    "final_model missing": Case(damage=remove("final_model")),
    "final_model damaged": Case(damage=flip(f"final_model/{MODEL}"), kept=("final_model.aside",)),
    "final_model with a file of the user's": Case(
        damage=write("final_model/notes.txt", "precious"), kept=("final_model.aside/notes.txt",)
    ),
    "final_model a file": replaced("final_model", "file"),
    "final_model a link": replaced("final_model", "dangling link", "{}.asid*"),
}
