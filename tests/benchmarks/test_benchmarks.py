"""The benchmark scripts: they can be imported, their arithmetic is right, what fails becomes a row, and time
runs out cleanly. What they measure is not tested here.
"""

import importlib.machinery
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

RECOMPUTED = "gradient_checkpointing=True"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def reachable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_script_can_be_imported(script):
    importlib.import_module(script)


def test_the_folder_trl_does_not_hide_trl():
    pytest.importorskip("trl")
    spec = importlib.machinery.PathFinder.find_spec("trl", [str(BENCHMARKS), *sys.path])
    assert spec is not None and spec.origin is not None and BENCHMARKS not in Path(spec.origin).parents


def test_shares_of_the_matrix_rate_by_hand():
    update = importlib.import_module("update")
    row = {"who": "ours", "seconds": 2.0, "parameters": 1_000_000, "tokens": 800, "tokens_run": 500}
    update.finish([row, {"who": "trl", "error": "out of memory"}], rate=1e10)
    assert row["tokens_per_s"] == 400
    assert row["share_of_matrix_rate"] == pytest.approx(6e6 * 500 / 2.0 / 1e10, abs=1e-4)
    assert row["share_by_work"] == pytest.approx(6e6 * 800 / 2.0 / 1e10, abs=1e-4)
    row["seconds"] = 1.0
    update.finish([row], rate=5e10)  # a row keeps the rate that was measured beside it
    assert row["share_of_matrix_rate"] == pytest.approx(6e6 * 500 / 1.0 / 1e10, abs=1e-4)


def test_the_table_shows_everyones_fastest_setting():
    update = importlib.import_module("update")
    contest = importlib.import_module("contest")
    rows = [
        {"who": "trl", "size": "1.5b", "shape": "full", "setting": "a", "seconds": 3.0},
        {"who": "trl", "size": "1.5b", "shape": "full", "setting": "b", "seconds": 2.0},
        {"who": "trl", "size": "1.5b", "shape": "full", "setting": "c", "error": "OutOfMemoryError: x"},
        {"who": "ours", "size": "1.5b", "shape": "full", "setting": "defaults", "seconds": 1.0},
        {"who": "ours", "size": "1.5b", "shape": "full", "setting": RECOMPUTED, "seconds": 1.5},
        {"who": "ours", "size": "0.5b", "shape": "full", "setting": "defaults", "seconds": 0.51234},
        {"who": "padded", "size": "3b", "error": "the process ended with exit code -9"},
    ]  # fmt: skip
    lines = contest.table(update.fastest(rows), ("size", "who", "setting", "seconds")).splitlines()
    assert lines == [
        "| size | who | setting | seconds |",
        "|---|---|---|---|",
        "| 0.5b | ours | defaults | 0.512 |",
        "| 1.5b | ours | defaults | 1 |",
        f"| 1.5b | ours | {RECOMPUTED} | 1.5 |",
        "| 1.5b | trl | b | 2 |",
    ]
    failed = contest.table(rows[-1:], ("size", "who", "seconds"))
    assert "| 3b | padded | the process ended with exit code -9 |" in failed


def test_speedups_are_over_trls_best_row_of_the_same_model():
    step = importlib.import_module("step")
    rows = [
        {"who": "ours", "size": "a", "total_s": 2.0},
        {"who": "trl_generate", "size": "a", "total_s": 9.0},
        {"who": "trl_generate", "size": "a", "total_s": 8.0},
        {"who": "trl_vllm", "size": "a", "error": "no vLLM"},
        {"who": "trl_vllm", "size": "b", "total_s": 3.0},
        {"who": "trl_vllm_uncorrected", "size": "b", "total_s": 1.0},
        {"who": "ours", "size": "b", "total_s": 0.5},
    ]
    step.finish(rows)
    assert rows[0]["speedup_over_trl_generate"] == 4.0 and "speedup_over_trl_vllm" not in rows[0]
    assert rows[1]["speedup_over_trl_generate"] == 0.89
    assert rows[-1]["speedup_over_trl_vllm"] == 2.0  # the fastest of TRL's ways with vLLM


@pytest.mark.parametrize(
    ("script", "words"), [("update", []), ("step", []), ("step", ["--cpu"]), ("memory", [])]
)
def test_the_tables_of_the_docs_are_made_of_the_kept_rows(script, words, capsys):
    module = importlib.import_module(script)
    kept = module.CPU_RESULTS if "--cpu" in words else module.RESULTS
    page = (BENCHMARKS.parent / "docs" / "lab" / "update.md").read_text()
    place = page.split(f"<!-- {kept.name} -->\n", 1)[1].split("<!-- end -->")[0]
    if not kept.is_file():
        assert not place.strip(), "a table without rows"
        return
    module.main([*words, "--table"])
    assert place == capsys.readouterr().out


def test_a_table_goes_to_its_place_in_the_docs(tmp_path):
    contest = importlib.import_module("contest")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x.json -->\nold\n<!-- end -->\nb\n<!-- y.json -->\n<!-- end -->\nc\n")
    contest.into_docs("x.json", "| new |", page)
    contest.into_docs("y.json", "| other |", page)
    assert page.read_text() == (
        "a\n<!-- x.json -->\n| new |\n<!-- end -->\nb\n<!-- y.json -->\n| other |\n<!-- end -->\nc\n"
    )


def test_new_rows_replace_old_ones_of_the_same_identity(tmp_path):
    contest = importlib.import_module("contest")
    path, identity = tmp_path / "results" / "x.json", ("who", "size")
    old = [
        {"who": "a", "size": 1, "s": 1.0, "date": "then"},
        {"who": "b", "size": 1, "s": 2.0, "date": "then"},
    ]
    contest.keep(path, old, identity, {"machine": "m"}, lambda rows: None)
    contest.keep(path, [{"who": "a", "size": 1, "s": 3.0}], identity, {"machine": "m"}, lambda rows: None)
    kept = json.loads(path.read_text())
    assert kept["machine"] == "m"
    assert [(row["who"], row["s"]) for row in kept["rows"]] == [("b", 2.0), ("a", 3.0)]
    assert kept["rows"][0]["date"] == "then" and kept["rows"][1]["versions"]["torch"] == torch.__version__


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A contender that does what its task says, run where the real ones are."""
    contest = importlib.import_module("contest")
    path = tmp_path / "contender.py"
    path.write_text(
        f"import sys, json, time\nsys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from contest import attempt\n"
        "task = json.loads(sys.argv[1])\n"
        "def fail(): raise MemoryError('first line\\nCUDA out of memory')\n"
        "attempt({'who': task['who'], 'n': 1}, lambda: {'seconds': 1.0})\n"
        "if task['does'] == 'fail': attempt({'who': task['who'], 'n': 2}, fail)\n"
        "if task['does'] == 'die': sys.exit(7)\n"
        "if task['does'] == 'hang': time.sleep(60)\n"
        "attempt({'who': task['who'], 'n': 3}, lambda: {'seconds': 3.0})\n"
    )
    return contest, str(path)


def test_a_failure_is_a_row_and_the_rest_goes_on(script):
    contest, path = script
    rows = contest.start(path, {"who": "x", "size": "s", "does": "fail"}, 60.0)
    assert [row.get("seconds") for row in rows] == [1.0, None, 3.0]
    assert rows[1]["error"] == "MemoryError: CUDA out of memory"


def test_a_death_is_a_row(script):
    contest, path = script
    rows = contest.start(path, {"who": "x", "size": "s", "does": "die"}, 60.0)
    assert rows[0]["seconds"] == 1.0
    assert rows[1]["error"] == "the process ended with exit code 7"


def test_time_runs_out_cleanly(script, tmp_path, capsys):
    contest, path = script
    found = contest.Contest(
        script=path,
        identity=("who", "n"),
        about={},
        out=tmp_path / "r.json",
        limit_s=25.0,
        finish=lambda _: None,
    )
    begun = time.monotonic()
    found.begun -= 22.0  # only three seconds are left
    found.run({"who": "x", "size": "s", "does": "hang"}, at_least_s=1.0)
    assert time.monotonic() - begun < 20
    assert found.rows[-1]["error"] == "stopped at the time limit"
    assert len(json.loads((tmp_path / "r.json").read_text())["rows"]) == len(found.rows)
    found.run({"who": "y", "size": "s", "does": "nothing"})
    assert "y s: left out" in capsys.readouterr().out


def test_the_same_work_for_everyone():
    work_module = importlib.import_module("update_work")
    contenders = importlib.import_module("update_contenders")
    small = {"num_prompts": 2, "group": 3, "prompt_tokens": (3, 6), "new_tokens": (2, 5), "vocabulary": 50}
    work = work_module.Work("ragged", **small)
    again = work_module.work_of(json.loads(json.dumps(work_module.asdict(work))))
    assert again == work and again.completions() == work.completions()
    prompts, completions = work.prompts(), work.completions()
    assert work.tokens == 3 * sum(map(len, prompts)) + sum(map(len, completions))
    assert work_module.Work("full", **small).tokens == 3 * sum(map(len, prompts)) + 6 * 5
    alike = work_module.Work("klong", **small, shared_tokens=2).prompts()
    assert alike[0][:2] == alike[1][:2] and alike[0][2:] != alike[1][2:] and min(map(len, alike)) >= 3
    groups = contenders.groups_of(work)
    ours = [
        (r.prompt_ids, r.completion.token_ids, r.score.reward) for group in groups for r in group.rollouts
    ]
    inputs = contenders.trl_inputs(work, torch.device("cpu"))
    for n, (prompt, completion, reward) in enumerate(ours):
        kept = inputs["prompt_ids"][n][inputs["prompt_mask"][n].bool()]
        assert tuple(kept.tolist()) == prompt
        kept = inputs["completion_ids"][n][inputs["completion_mask"][n].bool()]
        assert tuple(kept.tolist()) == completion and reward == work.rewards()[n]
    assert inputs["num_items_in_batch"] == sum(map(len, completions))
    assert inputs["advantages"].view(2, 3).sum(1).abs().max() < 1e-5
    # and what the plain way pads is the same again
    for chosen, tokens, mask, completion in contenders.micro_batches(work, 4, torch.device("cpu")):
        for row, n in enumerate(chosen):
            assert tuple(tokens[row][mask[row].bool()].tolist()) == (*ours[n][0], *ours[n][1])
            assert tuple(tokens[row][completion[row].bool()].tolist()) == ours[n][1]


def test_others_work_is_seen_and_waited_for():
    quiet = importlib.import_module("quiet")
    burn = "import time\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", burn])
    try:
        time.sleep(0.5)
        others = quiet.Others()
        time.sleep(1.0)
        assert others.share() > 0.4
        assert not quiet.wait_for_quiet(limit_s=0.0, window_s=0.3)
    finally:
        process.kill()
        process.wait()
    others = quiet.Others()
    own = time.process_time()
    while time.process_time() - own < 0.5:  # our own work is not others'
        pass
    begun = others._busy
    assert others.share() < (quiet.busy_s() - begun) / 0.5


def test_a_letter_is_a_token_and_every_token_can_be_read(tmp_path):
    random_model = importlib.import_module("random_model")
    from transformers import AutoTokenizer, Qwen2Config

    Qwen2Config().save_pretrained(tmp_path)  # Qwen2's own tokenizer is what transformers makes of the file
    random_model.make_tokenizer(1000).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = random_model.text_of(list(range(200)))
    assert len(tokenizer(text)["input_ids"]) == 200
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode([300, 999]) == "t300t999"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)


def test_the_picture_shows_the_kept_rows(tmp_path):
    from matplotlib.figure import Figure

    picture = importlib.import_module("picture")
    axes = Figure().subplots()
    picture.whole_step(axes)
    kept = [row for row in picture.rows_of("step") if "total_s" in row]
    stages = [row[stage] for row in kept for stage in ("generation_s", "update_s", "sync_s")]
    widths = [bar.get_bbox().width for bar in axes.patches]  # type: ignore[attr-defined]
    assert sorted(widths) == pytest.approx(sorted(stages))
    assert {text.get_text() for text in axes.texts} == {f"{row['total_s']:.1f} s" for row in kept}
    picture.draw(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"


def test_the_figures_of_a_server_by_hand():
    serving = importlib.import_module("serving")
    firsts = [0.4, 0.1, 0.2, 0.3]
    outcomes = [serving.Outcome(first, first + 1, 10) for first in firsts]
    row = serving.summarize("ours", [*outcomes, serving.Outcome(0.0, 9.0, 0, "refused")], 4.0)
    assert (row["requests"], row["failures"], row["first_error"]) == (5, 1, "refused")
    assert (row["tokens"], row["tokens_per_s"]) == (40, 10.0)
    assert (row["first_token_median_s"], row["first_token_p95_s"]) == (0.25, 0.4)
    assert row["request_median_s"] == 1.25
