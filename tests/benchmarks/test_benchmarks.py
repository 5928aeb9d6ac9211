"""The benchmark scripts: they can be imported, their arithmetic is right, and docs have the kept
rows. What they measure is not tested here.
"""

import importlib.machinery
import json
import sys
from pathlib import Path

import pytest
import torch

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


def test_the_figures_of_a_server_by_hand():
    serving = importlib.import_module("serving")
    firsts = [0.4, 0.1, 0.2, 0.3]
    outcomes = [serving.Outcome(first, first + 1, 10) for first in firsts]
    row = serving.summarize("ours", [*outcomes, serving.Outcome(0.0, 9.0, 0, "refused")], 4.0)
    assert (row["requests"], row["failures"], row["first_error"]) == (5, 1, "refused")
    assert (row["tokens"], row["tokens_per_s"]) == (40, 10.0)
    assert (row["first_token_median_s"], row["first_token_p95_s"]) == (0.25, 0.4)
    assert row["request_median_s"] == 1.25
