"""`whet compare`: how a grid is read, and a real one of tiny runs: stopped, gone on with, and added up."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from whetstone.__main__ import run
from whetstone.commands.compare.grid import parse_grid, split_top, write_table
from whetstone.commands.compare.progress import Progress
from whetstone.commands.compare.results import markdown_table
from whetstone.errors import UserError
from whetstone.run.comparison import make_results, over_pairs, over_seeds

ROOT = Path(__file__).resolve().parents[2]
EASY = "datasets={chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}"
TINY = [
    EASY,
    "max_steps=2",
    "prompts_per_step=2",
    "num_generations=4",
    "max_completion_length=24",
    "eval_num_samples=8",
    "fixed_eval_steps=1",
    "save_strategy='no'",
    "reward_workers=1",
    "preflight=off",
]


# --- the grid ---


def test_commas_split_only_outside_brackets_and_quotes() -> None:
    assert split_top("grpo,dapo", ",") == ["grpo", "dapo"]
    assert split_top("[accuracy,format]", ",") == ["[accuracy,format]"]
    assert split_top("[accuracy],[accuracy,format]", ",") == ["[accuracy]", "[accuracy,format]"]
    assert split_top('{"a": {"x": 1, "y": (2,3)}}', ",") == ['{"a": {"x": 1, "y": (2,3)}}']
    assert split_top("'one, two',three", ",") == ["'one, two'", "three"]


def test_a_grid_is_every_combination_with_single_values_for_all() -> None:
    grid = parse_grid(
        "quickstart", ["loss_type=grpo,dapo", "beta=0,0.1", "seed=1,2", "max_steps=3", "output_dir=/tmp/x"]
    )
    assert grid.folder == Path("/tmp/x/compare")
    assert len(grid.cells) == 8
    assert [cell.name for cell in grid.cells[:3]] == [
        "loss_type=grpo_beta=0_seed=1",
        "loss_type=grpo_beta=0_seed=2",
        "loss_type=grpo_beta=0.1_seed=1",
    ]
    last = grid.cells[-1]
    assert (last.variant, last.seed) == ("loss_type=dapo beta=0.1", 2)
    assert last.settings == ["max_steps=3", "output_dir=/tmp/x", "loss_type=dapo", "beta=0.1", "seed=2"]


def test_variants_bring_their_own_settings() -> None:
    words = "variant=gspo: loss_type=gspo epsilon=3e-4; cispo: loss_type=cispo epsilon_high=5"
    grid = parse_grid("quickstart", [words, "seed=1,2", "run_name=mine"])
    assert grid.folder == Path("outputs/mine")
    assert [cell.name for cell in grid.cells] == [
        "gspo_seed=1",
        "gspo_seed=2",
        "cispo_seed=1",
        "cispo_seed=2",
    ]
    assert grid.cells[0].settings == ["loss_type=gspo", "epsilon=3e-4", "seed=1"]
    assert grid.cells[2].settings == ["loss_type=cispo", "epsilon_high=5", "seed=1"]
    unnamed = parse_grid("quickstart", ["variant=loss_type=gspo epsilon=3e-4; loss_type=dapo"])
    assert [cell.variant for cell in unnamed.cells] == ["loss_type=gspo epsilon=3e-4", "loss_type=dapo"]
    assert unnamed.cells[0].seed == 42  # the recipe's own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["loss_type=grpo"], "nothing to compare"),
        (["loss_type=grpo,nonsense"], "loss_type"),
        (["los_type=grpo,dapo"], "'los_type'.*'loss_type'"),
        (["seed=1,2,"], "seed=1,2,"),
        (["loss_type=grpo,grpo"], "loss_type.*grpo"),
        (["output_dir=a,b", "seed=1,2"], "output_dir"),
        (["seed=1,2", "eval_num_samples=0"], "eval_num_samples"),
        (["variant=gspo: epsilon"], "variant="),
        (["seed=1,2", "more"], "'more'"),
    ],
)
def test_invalid_comparison_is_refused_before_it_runs(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match="(?s)" + says.replace("(", "\\(")):
        parse_grid("quickstart", words)


def test_flags_and_folders_that_make_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["loss_type=grpo,dapo"], "Name a configuration first"),
        (["quickstart", "seed=1,2", "--jobs", "none"], "--jobs"),
        (["quickstart", "seed=1,2", "--jobs"], "--jobs"),
        (["--table", str(tmp_path)], "holds no comparison"),
    ):
        assert run(["compare", *words]) == 2
        assert says in capsys.readouterr().err


# --- the numbers ---


def test_the_interval_over_seeds_by_hand() -> None:
    # Three seeds, mean 0.2, standard deviation 0.1: t(2) = 4.302653, half width 4.302653 * 0.1 / sqrt(3).
    interval = over_seeds([0.1, 0.2, 0.3], -1.0, 1.0)
    assert interval["mean"] == pytest.approx(0.2)
    assert interval["high"] == pytest.approx(0.2 + 4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    assert interval["low"] == pytest.approx(0.2 - 4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    # Two seeds: t(1) = 12.7 reaches far beyond what a share can be.
    assert (over_seeds([0.1, 0.9])["low"], over_seeds([0.1, 0.9])["high"]) == (0.0, 1.0)
    assert over_seeds([0.4]) == {"mean": 0.4, "low": None, "high": None}


def test_a_table_of_one_seed_without_greedy_has_no_interval() -> None:
    grid = parse_grid("quickstart", ["loss_type=grpo,dapo"])
    share = {"mean": 0.5, "low": 0.25, "high": 0.75, "num_problems": 8}
    done = {
        "accuracy_before": share, "accuracy_after": share | {"mean": 0.625}, "greedy_before": None,
        "greedy_after": None, "seconds": 3.0,
    }  # fmt: skip
    results = make_results("quickstart", grid.cells, {"loss_type=grpo": done}, {"loss_type=dapo": "no luck"})
    assert results["missing"] == [] and results["failed"] == {"loss_type=dapo": "no luck"}
    text = markdown_table(results)
    assert "| loss_type=grpo | 1 | 50.0 | 62.5 | +12.5 |  | 3 |" in text
    assert "Failed: loss_type=dapo: no luck" in text


def done(before: float, after: float) -> dict:
    share = {"low": 0.0, "high": 1.0, "num_problems": 8}
    return {
        "accuracy_before": share | {"mean": before}, "accuracy_after": share | {"mean": after},
        "greedy_before": None, "greedy_after": None, "seconds": 60.0, "model_step": 20,
    }  # fmt: skip


def finished(folder: Path, name: str, result: dict, answers: list[bool]) -> None:
    """A run folder as far as a comparison looks at it; only the evaluation of `model_step` has answers."""
    completions = [{"problem": f"p{i}", "correct": right} for i, right in enumerate(answers)]
    for step in (0, 20, 3, 30):  # the best model is not that of the last evaluation
        path = folder / "runs" / name / "eval_results" / f"eval_step_{step}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = completions if step == 20 else []
        path.write_text(json.dumps({"step": step, "summary": {}, "completions": shown}))
    (folder / "runs" / name / "train_results.json").write_text(json.dumps(result))
    rows = [{"step": 0, "kind": "eval", "accuracy": 0.1}, {"step": 20, "kind": "eval", "accuracy": 0.5}]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "runs" / name / "metrics.jsonl").write_text(metrics)


def test_variants_are_compared_with_the_first_over_seeds(tmp_path: Path) -> None:
    grid = parse_grid("quickstart", ["loss_type=grpo,dapo", "seed=1,2,3", f"output_dir={tmp_path}"])
    for seed, (one, two) in {1: (0.5, 0.6), 2: (0.4, 0.6), 3: (0.6, 0.9)}.items():
        finished(grid.folder, f"loss_type=grpo_seed={seed}", done(0.4, one), [])
        finished(grid.folder, f"loss_type=dapo_seed={seed}", done(0.4, two), [])
    results = write_table(grid, {})
    first, second = results["variants"]
    assert first["versus"] is None
    # Differences 0.1, 0.2, 0.3: standard error 0.1 / sqrt(3), t = 3.4641 with 2 degrees, p = 0.0742.
    versus = second["versus"]
    assert (versus["over"], versus["num_pairs"]) == ("seeds", 3)
    assert versus["mean"] == pytest.approx(0.2) and versus["p_value"] == pytest.approx(0.07418, abs=1e-4)
    assert versus["low"] == pytest.approx(0.2 - 4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    assert "+20.0" in (grid.folder / "table.md").read_text()


def test_with_one_seed_the_problems_are_the_pairs(tmp_path: Path) -> None:
    grid = parse_grid("quickstart", ["loss_type=grpo,dapo", f"output_dir={tmp_path}"])
    finished(grid.folder, "loss_type=grpo", done(0.4, 2 / 8), [True, True, *[False] * 6])
    finished(grid.folder, "loss_type=dapo", done(0.4, 7 / 8), [*[True] * 7, False])
    versus = write_table(grid, {})["variants"][1]["versus"]
    # Five problems came out better and none worse: McNemar's exact p-value is 2 / 2^5.
    assert (versus["over"], versus["num_pairs"], versus["mean"]) == ("problems", 8, 5 / 8)
    assert versus["p_value"] == pytest.approx(2 / 32)
    # Other problems are no pairs.
    finished(grid.folder, "loss_type=dapo", done(0.4, 0.5), [True] * 9)
    assert write_table(grid, {})["variants"][1]["versus"] is None


def test_seeds_that_all_differ_alike_are_not_called_certain() -> None:
    assert over_pairs([0.25, 0.25]) == {"mean": 0.25, "low": None, "high": None, "p_value": 0.5}


def test_whiskers_stay_inside_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float]] = []
    axes_of: list[Axes] = []
    whisker = Axes.errorbar

    def errorbar(axes: Axes, x: float, y: float, **rest: Any) -> Any:
        (low,), (high,) = rest["xerr"]
        drawn.append((x - low, x + high))
        axes_of.append(axes)
        return whisker(axes, x, y, **rest)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    grid = parse_grid("quickstart", ["loss_type=grpo,dapo", "seed=1,2", f"output_dir={tmp_path}"])
    for cell, after in zip(grid.cells, (0.1, 0.9, 0.3, 0.4), strict=True):
        finished(grid.folder, cell.name, done(0.4, after), [])
    write_table(grid, {})
    left, right = axes_of[0].get_xlim()
    assert len(drawn) == 2 and all(left <= low < high <= right for low, high in drawn)


def test_a_comparison_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = parse_grid(
        "quickstart", ["loss_type=grpo,dapo", "seed=1,2", "max_steps=10", f"output_dir={tmp_path}"]
    )
    finished(grid.folder, grid.cells[0].name, done(0.25, 0.5), [])
    say = Progress(grid.source, grid.cells, grid.folder / "runs", 1)
    say.begin(3)
    say.finished(grid.cells[0], None)
    (grid.folder / "runs" / grid.cells[1].name).mkdir()
    rows = "".join(json.dumps({"step": step, "kind": "train"}) + "\n" for step in (1, 2, 3, 4))
    (grid.folder / "runs" / grid.cells[1].name / "metrics.jsonl").write_text(rows)
    say._looked_at = say._printed_at = -1e9
    say.look([(grid.cells[1], time.monotonic() - 30)])
    header, ended, running = capsys.readouterr().out.splitlines()
    assert header.startswith("4 runs: 2 variants x 2 seeds; 1 of them are done")
    assert "25.0 % -> 50.0 % (done before)" in ended and "about 3 min left" in ended
    # Runs of 60 s: 30 s of this one and two more.
    assert "step 4/10, 30 s" in running and "about 2 min left" in running


# --- a real grid ---


def _results(folder: Path) -> dict[str, dict]:
    return {
        path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/train_results.json")
    }


def _times(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("runs/*/train_results.json")}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("grid")
    return ["quickstart", "loss_type=grpo,dapo", "seed=1,2", *TINY, f"output_dir={place}", "--jobs", "2"]


@pytest.fixture(scope="module")
def stopped(words: list[str]) -> tuple[Path, int, dict[str, int]]:
    """The grid, stopped by Ctrl-C as soon as a run has ended: folder, exit code, which runs were done."""
    folder = Path(words[-3].partition("=")[2]) / "compare"
    command = [sys.executable, "-m", "whetstone", "compare", *words]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not _times(folder) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=120)
    return folder, code, _times(folder)


@pytest.mark.slow
def test_a_grid_goes_on_where_it_was_stopped_and_adds_up(
    words: list[str], stopped: tuple[Path, int, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, code, before = stopped
    assert code == 130
    assert 1 <= len(before) < 4
    assert run(["compare", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("done before") == len(before) and "run 4/4" in printed
    after = _times(folder)
    assert len(after) == 4 and before.items() <= after.items()  # what was done was not touched

    runs = _results(folder)
    document = json.loads((folder / "results.json").read_text())
    assert [variant["name"] for variant in document["variants"]] == ["loss_type=grpo", "loss_type=dapo"]
    for variant in document["variants"]:
        one, two = (runs[f"{variant['name']}_seed={seed}"] for seed in (1, 2))
        gains = [run["accuracy_after"]["mean"] - run["accuracy_before"]["mean"] for run in (one, two)]
        half = 12.706205 * statistics.stdev(gains) / math.sqrt(2)
        mean = (gains[0] + gains[1]) / 2
        assert variant["gain"]["mean"] == pytest.approx(mean)
        start = (one["accuracy_before"]["mean"] + two["accuracy_before"]["mean"]) / 2
        assert variant["gain"]["low"] == pytest.approx(max(-start, mean - half), abs=1e-6)
        assert variant["gain"]["high"] == pytest.approx(min(1 - start, mean + half), abs=1e-6)
        final = (one["accuracy_after"]["mean"] + two["accuracy_after"]["mean"]) / 2
        assert variant["accuracy_after"]["mean"] == pytest.approx(final)
        greedy = (one["greedy_after"]["mean"] + two["greedy_after"]["mean"]) / 2
        assert variant["greedy_after"]["mean"] == pytest.approx(greedy)
        assert variant["seconds"] == pytest.approx((one["seconds"] + two["seconds"]) / 2)
        assert [run["accuracy_after"] for run in variant["seeds"]] == [
            one["accuracy_after"],
            two["accuracy_after"],
        ]
        assert f"| {variant['name']} | 2 | " in (folder / "table.md").read_text()
        assert f"{100 * final:.1f}" in printed
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "2 steps in" in (folder / "logs" / "loss_type=dapo_seed=2.log").read_text()

    # Once more: nothing is run. And the table alone, from the folder.
    begun = time.monotonic()
    assert run(["compare", *words]) == 0
    assert capsys.readouterr().out.count("done before") == 4
    assert _times(folder) == after
    (folder / "table.md").unlink()
    assert run(["compare", "--table", str(folder)]) == 0
    assert (folder / "table.md").is_file() and _times(folder) == after
    assert time.monotonic() - begun < 20


@pytest.mark.slow  # goes on where the one above has been
def test_a_failed_run_is_told_and_the_others_count(
    words: list[str], stopped: tuple[Path, int, dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped[0]
    (folder / "runs" / "loss_type=dapo_seed=3").write_text("")  # no run folder can be made where a file lies
    assert run(["compare", words[0], "variant=loss_type=dapo", "seed=1,2,3", *words[3:]]) == 2
    told = capsys.readouterr()
    assert "1 of 3 runs failed (loss_type=dapo_seed=3)" in told.err
    assert told.out.count("run 3/3  loss_type=dapo_seed=3  failed: ") == 1
    assert told.out.count("done before") == 2
    document = json.loads((folder / "results.json").read_text())
    assert [variant["name"] for variant in document["variants"]] == ["loss_type=dapo"]
    assert document["variants"][0]["num_seeds"] == 2
    assert set(document["failed"]) == {"loss_type=dapo_seed=3"}
