"""Bad command lines: commands, words and files that a person can get wrong."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.torture.inputs import TINY, Case

COMMANDS = (
    "train",
    "eval",
    "check",
    "config",
    "tasks",
    "report",
    "explain",
    "doctor",
    "profile",
    "compare",
    "serve",
    "launch",
    "completion",
    "chat",
    "sample",
)


def cases() -> list[Case]:
    return [*_unknown(), *_keys(), *_files(), *_folders()]


def _unknown() -> Iterator[Case]:
    for word in (
        "tarin",
        "Train",
        "--train",
        "",
        " ",
        "\x00",
        "é",
        "-",
        "--",
        "train;ls",
        "../train",
        "x" * 5000,
    ):
        yield Case(name=f"unknown command {word[:20]!r}", argv=[word])
    for command in COMMANDS:
        yield Case(name=f"{command}: unknown configuration", argv=[command, "no-such-thing-at-all"])
        yield Case(name=f"{command}: unknown key", argv=[command, "no_such_key=1"])
        yield Case(name=f"{command}: unknown flag", argv=[command, "--no-such-flag"])
    for command in ("report", "explain"):
        yield Case(name=f"{command} without a run", argv=[command])
        yield Case(name=f"{command} of two runs", argv=[command, "a", "b"])
    yield Case(name="profile: no number", argv=["profile", "--steps", "many"])
    yield Case(name="profile: negative number", argv=["profile", "--steps", "-1"])
    yield Case(name="tasks: answer without text", argv=["tasks", "chain_sum", "--answer"])
    yield Case(name="compare: nothing to compare", argv=["compare", "quickstart"])
    yield Case(name="compare: a table of nothing", argv=["compare", "--table", "nowhere"])
    yield Case(name="compare: no jobs", argv=["compare", "quickstart", "seed=1,2", "--jobs", "0"])
    yield Case(name="sample: no prompt", argv=["sample", "pebble"])
    yield Case(name="sample: no answers", argv=["sample", "pebble", "--text", "x", "-n", "0"])
    yield Case(
        name="sample: temperature as a word", argv=["sample", "pebble", "--text", "x", "--temperature", "hot"]
    )
    yield Case(name="sample: no such file", argv=["sample", "pebble", "--prompt", "nowhere.txt"])
    yield Case(name="sample: an endless device", argv=["sample", "pebble", "--prompt", "/dev/zero"])
    yield Case(name="sample: a folder", argv=["sample", "pebble", "--prompt", "."])
    yield Case(name="sample: a problem of no run", argv=["sample", "pebble", "--problem", "chain_sum"])
    yield Case(name="chat: a seed below zero", argv=["chat", "pebble", "--seed", "-1"])
    yield Case(name="launch: no ranks", argv=["launch", "--ray", "--ranks", "0", "train"])
    yield Case(name="launch: ranks as a word", argv=["launch", "--ray", "--ranks", "two", "train"])


def _keys() -> Iterator[Case]:
    wrong = {
        "max_steps": ("many", "1.5", "[]", "{}", "''", "1e400"),
        "learning_rate": ("fast", "-1", "nan", "[1]"),
        "num_generations": ("0", "-3", "two", "1.5"),
        "temperature": ("0", "-1", "hot", "nan"),
        "model_name_or_path": ("nowhere/at/all", "./nowhere", "/etc/passwd", "/", "''"),
        "datasets": (
            "chain_sum",
            "[]",
            "{chain_sun: {}}",
            "{chain_sum: 3}",
            "{chain_sum: {config: 3}}",
            "{",
            "3",
        ),
        "reward_funcs": (
            "[acuracy]",
            "accuracy:",
            "[nowhere.py:f]",
            "[os:system]",
            "[accuracy, accuracy]",
            "3",
        ),
        "loss_type": ("ppo", "3", "[]"),
        "rollout_engine": ("vlm", "''"),
        "optim": ("adam", "3"),
        "output_dir": ("/proc/nowhere", "/dev/null/x"),
        "resume_from_checkpoint": ("nowhere", "checkpoint-99"),
        "device": ("gpu", "cuda:99"),
        "seed": ("x", "1.5"),
        "lr_scheduler_type": ("cosin", "3"),
        "reward_weights": ("[1, 2, 3]", "x"),
        "eval_datasets": ("{nothing: {}}",),
    }
    for key, values in wrong.items():
        for value in values:
            words = [word for word in TINY if not word.startswith(f"{key}=")]
            yield Case(name=f"{key}={value}", argv=["train", *words, f"{key}={value}"])
    for word in (
        "=1",
        "max_steps",
        "max_steps==1",
        "max steps=1",
        "--max_steps",
        "max_steps=",
        "=",
        "a.b.c=1",
    ):
        codes = (0, 2) if word == "max_steps=" else (2,)
        yield Case(name=f"word {word!r}", argv=["train", *TINY, word], codes=codes)


def _files() -> Iterator[Case]:
    contents: dict[str, str | bytes] = {
        "empty": "",
        "a list": "- max_steps\n- 3\n",
        "a number": "42",
        "a text": "max_steps",
        "not YAML": "a: [1, 2",
        "tabs": "max_steps:\t1\n\tseed: 2\n",
        "two documents": "max_steps: 1\n---\nmax_steps: 2\n",
        "a Python object": "seed: !!python/object/apply:os.system ['touch executed']\n",
        "binary": bytes(range(256)),
        "UTF-16": "max_steps: 1\n".encode("utf-16"),
        "null bytes": b"max_steps: 1\x00\n",
        "unknown keys": "max_stepz: 1\nsead: 2\n",
        "keys of no text": "1: 2\nnull: 3\n",
        "JSON of a list": "[1, 2]",
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(64),
        "deep": "[" * 5000,
        "a page": "<html><body>404</body></html>",
    }
    for name, content in contents.items():
        codes = (0, 2) if name in ("empty",) else (2,)
        argv = ["config", "bad.yaml"] if name == "empty" else ["train", "bad.yaml", *TINY]
        yield Case(name=f"configuration: {name}", argv=argv, files={"bad.yaml": content}, codes=codes)


def _folder(folder: Path) -> None:
    (folder / "x.yaml").mkdir()


def _loop(folder: Path) -> None:
    (folder / "x.yaml").symlink_to("x.yaml")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "x.yaml")


def _socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # socket names must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("x.yaml")
    os.chdir(here)


def _dangling(folder: Path) -> None:
    (folder / "x.yaml").symlink_to("nowhere.yaml")


def _folders() -> Iterator[Case]:
    for prepare in (_folder, _loop, _pipe, _socket, _dangling):
        yield Case(name=f"configuration: {prepare.__name__[1:]}", argv=["config", "x.yaml"], prepare=prepare)
    yield Case(name="configuration: a device", argv=["config", "/dev/null"], codes=(0, 2))
    yield Case(name="configuration: an endless device", argv=["config", "/dev/zero"])
    yield Case(name="report of a file", argv=["report", "x.txt"], files={"x.txt": "x"})
    yield Case(name="report of an empty folder", argv=["report", "."])
    yield Case(name="explain an empty folder", argv=["explain", "."])
    yield Case(
        name="report of a broken run",
        argv=["report", "run"],
        files={"run/metrics.jsonl": b"\xff\xfe not JSON\n{}\n[]\n", "run/config.yaml": "{"},
        codes=(0, 2),
    )
    yield Case(
        name="explain a broken run",
        argv=["explain", "run"],
        files={"run/metrics.jsonl": '{"step": "x", "kind": "train"}\n{"step": 1}\n', "run/config.yaml": "[]"},
        codes=(0, 2),
    )
    yield Case(
        name="sample from a broken run",
        argv=["sample", "run", "--text", "x"],
        files={"run/config.yaml": "{", "run/final_model/config.json": "{}"},
    )
    yield Case(
        name="sample from an unfinished run",
        argv=["sample", "run", "--text", "x"],
        files={"run/config.yaml": "{}"},
    )
    yield Case(
        name="sample by lines that are no prompts",
        argv=["sample", "pebble", "--prompt", "x.jsonl"],
        files={"x.jsonl": '{"a": 1}\n[[[\n'},
    )
    yield Case(
        name="evaluation of a folder without weights",
        argv=["eval", "quickstart", "checkpoint_path=run", "eval_num_samples=1", "output_dir=out"],
        files={"run/config.json": "{}"},
    )
    yield Case(
        name="folder of another run",
        argv=["train", *TINY, "overwrite_output_dir=false"],
        files={"out/run/metrics.jsonl": '{"step": 1, "kind": "train"}\n', "out/run/notes.txt": "mine"},
    )
