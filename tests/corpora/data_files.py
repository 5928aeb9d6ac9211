"""Bad data files and settings, each with the command that meets it: the command must end with exit code 2 and
one sentence, without a traceback and without a hang.

A plain module without pytest: the unit tests run it in their own process, a campaign may run every command as
a process. `write(folder)` makes the files and yields the cases; the files of all cases are there after the
first one has been taken.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
QUESTION = {"question": "What is 2 + 2?", "answer": "4"}
TESTS = [{"args": [1], "expected": 2}]


class Case(NamedTuple):
    """One command; it must end with `code`."""

    name: str
    argv: list[str]
    code: int = 2


def write(folder: Path) -> Iterator[Case]:
    """Write every bad file into `folder` and yield the commands that read them."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [*_broken_files(folder), *_broken_rows(folder), *_places(folder), *_settings(folder)]
    cases += [*_countdown(folder), *_code(folder), *_runs(folder)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    yield from cases


def _tasks(name: str, path: Path | str, *settings: str, task: str = "rows") -> Case:
    return Case(name, ["tasks", task, f"path={path}", *settings])


def _put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def _rows(folder: Path, name: str, rows: list[Any]) -> Path:
    return _put(folder, f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


# ---- files that are no data --------------------------------------------------------------------------------


def _broken_files(folder: Path) -> Iterator[Case]:
    contents = {
        "empty": b"",
        "binary": bytes(range(256)) * 40,
        "nul": b"\0" * 4096,
        "utf16": '[{"question": "a", "answer": "1"}]'.encode("utf-16"),
        "latin1": '{"question": "Z\u00fcrich?", "answer": "1"}\n'.encode("latin-1"),
        "zip": b"PK\x03\x04" + b"\x00\x01\x02" * 100,
    }
    for kind, content in contents.items():
        for suffix in SUFFIXES:
            yield _tasks(f"{kind}{suffix}", _put(folder, f"{kind}{suffix}", content))
    texts = {
        "deep.json": "[" * 100_000 + "]" * 100_000,
        "deep.jsonl": '{"question": ' + "[" * 100_000 + "]" * 100_000 + ', "answer": "4"}\n',
        "nested.jsonl": '{"question": "a", "answer": "4", "x": ' + "[" * 200 + "]" * 200 + "}\n",
        "open.json": '[{"question": "a", "answer": "4"}, {"question": "b"',
        "number.json": "3",
        "text.json": '"question"',
        "null.json": "null",
        "one_object.json": '{"question": "a", "answer": "4"}',
        "list_of_texts.json": '["a", "b"]',
        "list_of_lists.json": "[[1, 2], [3, 4]]",
        "empty_list.json": "[]",
        "ragged_columns.json": '{"question": ["a", "b"], "answer": ["1"]}',
        "late_text.jsonl": json.dumps(QUESTION) + "\n" + json.dumps("no row") + "\n",
        "late_fault.jsonl": json.dumps(QUESTION) + "\n{oops\n",
        "two_objects_a_line.jsonl": json.dumps(QUESTION) + json.dumps(QUESTION) + "\n",
        "pretty_printed.jsonl": json.dumps(QUESTION, indent=2),
        "only_blank_lines.jsonl": "\n\n   \n",
        "huge_number.jsonl": '{"question": "a", "answer": ' + "9" * 10_000 + "}\n",
        "lone_surrogate.jsonl": '{"question": "a \\ud800 b", "answer": "4"}\n',
        "lone_surrogate_in_answer.json": '[{"question": "a", "answer": "\\udfff"}]',
        "lone_surrogate_in_name.jsonl": '{"question": "a", "answer": "4", "\\ud800": 1}\n',
        "header_only.csv": "question,answer\n",
        "more_cells.csv": "question,answer\na,1,2\n",
        "open_quote.csv": 'question,answer\n"a,1\nb,2\n',
        "two_of_a_name.csv": "question,question\na,b\n",
        "nul_inside.csv": "question,answer\na\0b,1\n",
        "no_header.csv": "What is 2 + 2?,4\n",
        "magic_only.parquet": "PAR1",
        "magic_twice.parquet": "PAR1" + "x" * 100 + "PAR1",
        "rows.xlsx": "x",
        "rows.txt": json.dumps(QUESTION),
        "rows": json.dumps(QUESTION),
    }
    for name, text in texts.items():
        yield _tasks(name, _put(folder, name, text))
    yield _tasks("cut.parquet", _put(folder, "cut.parquet", _parquet(folder)[:-30]))
    damaged = bytearray(_parquet(folder))
    damaged[-60:-20] = b"\xff" * 40
    yield _tasks("damaged.parquet", _put(folder, "damaged.parquet", bytes(damaged)))


def _parquet(folder: Path) -> bytes:
    import pyarrow
    import pyarrow.parquet

    path = folder / "good.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([QUESTION] * 50), path)
    return path.read_bytes()


# ---- rows that can't be used -------------------------------------------------------------------------------


def _broken_rows(folder: Path) -> Iterator[Case]:
    rows: dict[str, list[Any]] = {
        "no_prompt": [{"text": "a", "answer": "4"}],
        "no_answer": [{"question": "a", "text": "4"}],
        "empty_prompts": [{"question": "", "answer": "4"}, {"question": None, "answer": "4"}],
        "empty_answers": [{"question": "a", "answer": ""}, {"question": "b", "answer": None}],
        "empty_rows": [{}, {}],
        "prompt_is_an_object": [{"question": {"text": "a"}, "answer": "4"}],
        "prompt_is_a_list_of_numbers": [{"question": [1, 2], "answer": "4"}],
        "message_without_content": [{"prompt": [{"role": "user"}], "answer": "4"}],
        "message_with_a_number": [{"prompt": [{"role": "user", "content": 3}], "answer": "4"}],
        "message_with_a_picture": [
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}], "answer": "4"}
        ],
        "role_is_a_number": [{"prompt": [{"role": 3, "content": "a"}], "answer": "4"}],
        "only_the_assistant": [{"prompt": [{"role": "assistant", "content": "a"}], "answer": "4"}],
        "no_messages": [{"prompt": [], "answer": "4"}],
        "answer_is_an_object": [{"question": "a", "answer": {"value": 4}}],
        "answer_is_a_list": [{"question": "a", "answer": ["4", "four"]}],
        "late_object": [QUESTION, {"question": {"a": 1}, "answer": "4"}],
    }
    for name, entries in rows.items():
        yield _tasks(f"rows: {name}", _rows(folder, name, entries))
    for name in ("no_prompt", "no_answer", "empty_prompts", "empty_answers", "empty_rows"):
        yield _tasks(f"math: {name}", folder / f"{name}.jsonl", task="math")


# ---- places and settings -----------------------------------------------------------------------------------


def _places(folder: Path) -> Iterator[Case]:
    good = _rows(folder, "good", [QUESTION] * 3)
    (folder / "empty_folder").mkdir(exist_ok=True)
    (folder / "folder_of_text").mkdir(exist_ok=True)
    _put(folder / "folder_of_text", "notes.txt", "a")
    (folder / "folder.jsonl").mkdir(exist_ok=True)
    (folder / "two_kinds").mkdir(exist_ok=True)
    _put(folder / "two_kinds", "train.jsonl", json.dumps(QUESTION))
    _put(folder / "two_kinds", "train.csv", "question,answer\na,1\n")
    (folder / "model").mkdir(exist_ok=True)
    _put(folder / "model", "config.json", '{"model_type": "llama"}')
    (folder / "saved").mkdir(exist_ok=True)
    _put(folder / "saved", "state.json", "{}")
    (folder / "saved_dict").mkdir(exist_ok=True)
    _put(folder / "saved_dict", "dataset_dict.json", '{"splits": ["train"]}')
    (folder / "splits").mkdir(exist_ok=True)
    _put(folder / "splits", "train.jsonl", json.dumps(QUESTION))
    if not (folder / "pipe.jsonl").exists():
        os.mkfifo(folder / "pipe.jsonl")
    if not (folder / "dangling.jsonl").is_symlink():
        (folder / "dangling.jsonl").symlink_to(folder / "nowhere.jsonl")
    names = ("empty_folder", "folder_of_text", "folder.jsonl", "two_kinds", "model", "saved", "saved_dict")
    for name in (*names, "pipe.jsonl", "dangling.jsonl", "nowhere.jsonl", "nowhere/rows.json"):
        yield _tasks(f"place: {name}", folder / name)
    yield _tasks("place: root", "/")
    yield _tasks("place: device", "/dev/zero")
    yield _tasks("place: name of 5000 letters", "x" * 5000 + ".json")
    yield _tasks("place: line break", "a\\nb.json")
    yield _tasks("split that is not there", folder / "splits", "split=validation")
    yield _tasks("columns: none such", good, "answer_column=result")
    yield _tasks("columns: a number", good, "answer_column=3")
    yield _tasks("columns: a list", good, "prompt_column=[a]")
    yield Case("no path", ["tasks", "rows"])
    yield Case("path is a number", ["tasks", "rows", "path=3"])
    yield Case("path is a list", ["tasks", "rows", "path=[a,b]"])


def _settings(folder: Path) -> Iterator[Case]:
    good = folder / "good.jsonl"
    for setting in (
        *("match=fuzzy", "match=3", "match=[exact]", "match=none", "eval_fraction=0", "eval_fraction=1"),
        *(
            "eval_fraction=.nan",
            "eval_fraction=true",
            "eval_fraction=half",
            "max_samples=0",
            "max_samples=true",
        ),
        *("max_samples=many", "max_samples=1.5", "mtach=exact", "split=3", "name=[a]"),
    ):
        yield _tasks(f"rows: {setting}", good, setting)
    words = _rows(folder, "words", [{"question": "a", "answer": ""}])
    yield _tasks("match without answers", words, "match=exact")


# ---- countdown and code ------------------------------------------------------------------------------------


def _countdown(folder: Path) -> Iterator[Case]:
    rows: dict[str, Any] = {
        "no nums": {"target": 3},
        "no target": {"nums": [1, 2]},
        "nums are words": {"nums": "a b", "target": 3},
        "no numbers": {"nums": [], "target": 3},
        "nums is a number": {"nums": 7, "target": 3},
        "a fraction": {"nums": [1.5, 2], "target": 3},
        "a word as target": {"nums": [1, 2], "target": "three"},
        "a huge exponent": {"nums": ["1e999999999", 2], "target": 3},
        "a huge number": {"nums": [10**30, 2], "target": 3},
        "a thousand numbers": {"nums": list(range(1000)), "target": 3},
        "true as a number": {"nums": [True, 2], "target": 3},
        "null as a number": {"nums": [None, 2], "target": 3},
        "an object": {"nums": {"a": 1}, "target": 3},
    }
    for number, (name, row) in enumerate(rows.items()):
        path = _rows(folder, f"countdown_{number}", [{"nums": [1, 2], "target": 3}, row])
        yield _tasks(f"countdown: {name}", path, task="countdown")
    bare = _rows(folder, "countdown_bare", [{"a": 1}])
    yield _tasks("countdown: no columns", bare, task="countdown")


def _code(folder: Path) -> Iterator[Case]:
    good = {"statement": "Add 1 to x.", "function": "f", "tests": TESTS}
    changes: dict[str, dict[str, Any]] = {
        "args is a number": {"tests": [{"args": 1, "expected": 2}]},
        "args is a text": {"tests": [{"args": "12", "expected": 2}]},
        "args is an object": {"tests": [{"args": {"x": 1}, "expected": 2}]},
        "nothing expected": {"tests": [{"args": [1]}]},
        "no tests": {"tests": []},
        "tests are null": {"tests": None},
        "tests are a number": {"tests": 3},
        "tests of numbers": {"tests": [1, 2]},
        "unknown field": {"tests": [{"stdin": "1", "stdout": "2", "points": 5}]},
        "no call": {"function": None},
        "a call of no name": {"function": "f("},
        "a function that is a number": {"function": 3},
        "time limit in words": {"time_limit_s": "two seconds"},
        "time limit below 0": {"time_limit_s": -1},
        "time limit infinite": {"time_limit_s": float("inf")},
        "time limit is a list": {"time_limit_s": [1]},
        "unknown language": {"language": "klingon"},
        "language is a number": {"language": 3},
        "assertion that is no Python": {"tests": ["assert f(1) =="]},
        "assertion in a loop": {"tests": ["for i in range(3):\n    assert f(i) == i + 1"]},
        "assertion nested deeply": {"tests": ["assert " + "(" * 5000 + "1" + ")" * 5000]},
        "nothing asserted": {"tests": ["f(1)"]},
        "no statement": {"statement": ""},
    }
    for number, (name, change) in enumerate(changes.items()):
        path = _rows(folder, f"code_{number}", [good, {**good, **change}])
        settings = [] if "language" in change else ["language=python"]
        rest = [good | {"language": "python"}, {**good, **change}]
        path = _rows(folder, f"code_{number}", rest) if not settings else path
        yield _tasks(f"code: {name}", path, *settings, task="code")
    path = _rows(folder, "code_good", [good])
    for prompt in ("{question}", "{statement", "statement}", "{0}", "{statement.x}", "{statement!r}", "{}"):
        yield _tasks(f"code: prompt {prompt}", path, "language=python", f"prompt='{prompt}'", task="code")
    yield _tasks("code: language missing", path, task="code")
    yield _tasks("code: test_fields is a list", path, "language=python", "test_fields=[a]", task="code")


# ---- the same through a run --------------------------------------------------------------------------------


def _runs(folder: Path) -> Iterator[Case]:
    out = [f"output_dir={folder / 'outputs'}", "model_name_or_path=pebble", "overwrite_output_dir=true"]
    for recipe, name in (
        *(("rows", "lone_surrogate.jsonl"), ("rows", "nested.jsonl"), ("rows", "empty.parquet")),
        *(("math", "no_answer.jsonl"), ("math", "cut.parquet"), ("math", "nul_inside.csv")),
        *(("countdown", "countdown_0.jsonl"), ("sums", "code_0.jsonl"), ("sums", "code_12.jsonl")),
    ):
        argv = ["train", recipe, f"data_path={folder / name}", *out]
        yield Case(f"train {recipe}: {name}", argv)
    yield Case("train: one row", ["train", "rows", f"data_path={_rows(folder, 'one', [QUESTION])}", *out])
    yield Case("eval: no file", ["eval", "rows", f"data_path={folder / 'nowhere.jsonl'}", *out])
