"""Data sets that are known by name: from the hub (a stand-in that speaks its HTTP), its cache, a folder."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from tests.support.data_hub import serve_hub
from whetstone import __main__ as cli
from whetstone.config import load
from whetstone.tasks.rows import known, read, source

NOBODY = "http://hub.invalid"  # never resolves
# The rows of several data sets: name, side, number, first row; or the sentence.
READ = """
import json, logging, sys
from whetstone.errors import UserError
from whetstone.tasks import rows
logging.basicConfig(format="%(message)s")
for settings in json.loads(sys.argv[1]):
    for side in ("train", "eval"):
        try:
            found = rows.read(settings, side, "math")
            print(json.dumps([settings["dataset"], side, len(found), found[0]]))
        except UserError as error:
            print(json.dumps([settings["dataset"], side, 0, str(error)]))
"""


def write_parquet(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    questions = [f"What is {i} + 1?" for i in range(count)]
    answers = [f"{i} and 1 make <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}" for i in range(count)]
    pyarrow.parquet.write_table(pyarrow.table({"question": questions, "answer": answers}), path)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repositories of the hub: GSM8K with one test row missing, and one that is not known."""
    root = tmp_path_factory.mktemp("hub")
    write_parquet(root / "openai" / "gsm8k" / "main" / "train-00000-of-00001.parquet", 7473)
    write_parquet(root / "openai" / "gsm8k" / "main" / "test-00000-of-00001.parquet", 1318)
    (root / "openai" / "gsm8k" / "README.md").write_text("---\nlicense: mit\n---\n")
    own = root / "somebody" / "sums"
    own.mkdir(parents=True)
    lines = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) for i in range(12)]
    (own / "train.jsonl").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def fetched(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a process reads online; its cache stays, and the address of the hub no longer answers."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cwd")
    with serve_hub(root) as (address, asked):
        result = run([{"dataset": "gsm8k"}, {"dataset": "somebody/sums"}], address, home, folder)
    yield {"result": result, "asked": asked, "home": home, "folder": folder}


def environment(address: str, home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    return {**kept, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}


def run(settings: list[dict[str, str]], address: str, home: Path, folder: Path) -> Any:
    command = [sys.executable, "-c", READ, json.dumps(settings)]
    done = subprocess.run(command, env=environment(address, home), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


FIRST = {"question": "What is 0 + 1?", "answer": "0 and 1 make <<0+1=1>>1.\n#### 1"}
ROWS = [
    ["gsm8k", "train", 7473, FIRST],
    ["gsm8k", "eval", 1318, FIRST],
    ["somebody/sums", "train", 12, {"question": "0 + 1?", "answer": "1"}],
    ["somebody/sums", "eval", 12, {"question": "0 + 1?", "answer": "1"}],
]


def test_known_rows_come_from_the_hub_at_their_revision(fetched: dict[str, Any]) -> None:
    rows, said = fetched["result"]
    assert rows == ROWS
    assert "gsm8k has 1318 rows in split test, not 1319." in said and "split train" not in said
    asked = [line for line in fetched["asked"] if "openai/gsm8k" in line]
    revision = "740312add88f781978c0658806c59bc2815b9866"
    assert asked and all(f"/datasets/openai/gsm8k/resolve/{revision}/main/" in line for line in asked)


def test_the_cache_of_the_hub_is_enough(fetched: dict[str, Any]) -> None:
    settings = [{"dataset": "gsm8k"}, {"dataset": "somebody/sums"}]
    rows, _ = run(settings, NOBODY, fetched["home"], fetched["folder"])
    assert rows == ROWS


def test_without_either_one_sentence_says_what_to_fetch(root: Path, tmp_path: Path) -> None:
    rows, _ = run([{"dataset": "gsm8k"}], NOBODY, tmp_path / "home", tmp_path)
    sentence = rows[0][3]
    command = re.search(r"run `hf (download openai/gsm8k .*)`, then set path=(\S+) split=(\w+) ", sentence)
    assert command is not None and sentence.count("\n") == 0, sentence
    assert sentence.endswith("eval_split=test.") and "no network, and no copy in the hub's cache" in sentence
    with serve_hub(root) as (address, _):  # what it says to do works
        words = [sys.executable, "-m", "huggingface_hub.cli.hf", *command[1].split()]
        subprocess.run(words, env=environment(address, tmp_path / "other"), cwd=tmp_path, check=True)
    found = read({"path": str(tmp_path / command[2]), "split": command[3]}, "train", "math")
    assert len(found) == 7473 and found[0] == FIRST


def test_a_folder_of_the_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "gsm8k" / "train.parquet", 5)
    assert known("gsm8k") is None
    assert len(read({"dataset": "gsm8k"}, "train", "math")) == 5
    assert source({"dataset": "gsm8k"}, "eval") == ("gsm8k", None, "train")  # as any folder: held out


@pytest.mark.parametrize(
    ("settings", "train", "evaluated"),
    [
        ({"dataset": "gsm8k"}, ("gsm8k", "train"), ("gsm8k", "test")),
        ({"path": "mbpp"}, ("mbpp", "train"), ("mbpp", "test")),
        ({"dataset": "humaneval"}, ("humaneval", "test"), ("humaneval", "test")),
        ({"dataset": "mbpp", "split": "prompt", "eval_split": "validation"},
         ("mbpp", "prompt"), ("mbpp", "validation")),
        ({"dataset": "math", "eval_path": "math500"}, ("math", "train"), ("math500", "test")),
        ({"dataset": "somebody/gsm8k", "split": "a"}, ("somebody/gsm8k", "a"), ("somebody/gsm8k", "a")),
    ],
)  # fmt: skip
def test_each_side_has_its_split(
    settings: dict[str, Any], train: tuple[str, str], evaluated: tuple[str, str]
) -> None:
    assert [source(settings, side)[::2] for side in ("train", "eval")] == [train, evaluated]


def test_the_manual_has_the_table() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "data.md").read_text(encoding="utf-8")
    for name in json.loads((root / "config" / "datasets.json").read_text(encoding="utf-8")):
        entry = known(name)
        assert entry is not None
        assert re.fullmatch(r"[0-9a-f]{40}", entry["revision"]) and entry["file"].count("{}") == 1
        splits = ", ".join(f"{split} {count:,}" for split, count in entry["rows"].items())
        assert f"| `{name}` | {entry['repository']} | {splits} | {entry['license']} |" in page


def test_the_recipe_of_gsm8k_trains_on_a_fresh_machine(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *(
            "model_name_or_path=pebble",
            "bf16=false",
            "max_steps=1",
            "prompts_per_step=2",
            "num_generations=2",
        ),
        *("reward_workers=1", "max_completion_length=8", "eval_num_samples=2", "eval_greedy=false"),
        "preflight=off",
    ]
    with serve_hub(root) as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        assert cli.run(["train", "gsm8k", *words]) == 0
        assert cli.run(["init", "gsm8k", "run_name=first"]) == 0
    assert any(line.startswith("GET /datasets/openai/gsm8k/resolve/") for line in asked)
    assert load("first.yaml").config.tasks.datasets["rows"].config["dataset"] == "gsm8k"
    told = capsys.readouterr().out
    assert "<answer>1</answer>" in told and "whet train first.yaml" in told
    # Two of the questions are evaluated on: here they are training questions as well, which are left out.
    assert "7,471 training problems" in told and "2 evaluations of 2 problems" in told
    assert (tmp_path / "outputs" / "gsm8k" / "train_results.json").is_file()
