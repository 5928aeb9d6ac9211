"""Verdicts on runs of Qwen2.5-Coder-1.5B that were really made (docs/recipes): their metrics are in runs/,
shortened to the columns that checks look at.
"""

import json
from pathlib import Path

import pytest

from whetstone.diagnosis.explain import diagnose
from whetstone.diagnosis.history import Diagnosis, Severity

RUNS = Path(__file__).parent / "runs"
ALIKE = "No reward variance: the completions of a prompt are too much alike"
BY_HEART = "It learns its training problems, not others"
VERDICTS = {
    "gsm8k_44": ["Healthy: it learns"],
    "programs": ["It learned to solve these problems"],
    "countdown_8": ["It collapsed"],  # two prompts an update
    "countdown_entropy": ["The answers become noise"],  # right all the same: thoughts are not paid for
    "countdown_plain_42": ["Many completions are cut off"],
    "math": ["The learning rate is too low"],  # 5e-6 with LoRA
    "math_8": ["Batches wait for their longest completion"],
    "multi_tasks": [ALIKE],  # no collapse: 4 prompts a step vary by chance
    "klong": [ALIKE],
    "klong_problems": [BY_HEART, ALIKE, "Entropy is gone: the policy has stopped exploring"],
    "q_rehearsal": [BY_HEART, ALIKE, "Entropy is gone: the policy has stopped exploring"],
    "klong_sft": ["Healthy: it learns"],  # to imitate is to lose entropy
    "gsm8k_sft": ["Imitation makes the answers worse"],
    "klong_sft_rl": ["It was better before", "Little reward variance: most prompts are solved"],
}


def rows_of(columns: dict[str, list[float]]) -> list[dict[str, float]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def verdicts_on(name: str) -> list[Diagnosis]:
    kept = json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))
    return diagnose(rows_of(kept["rows"]), rows_of(kept["evals"]), kept["config"])


@pytest.mark.parametrize("name", sorted(path.stem for path in RUNS.iterdir()))
def test_verdicts(name: str) -> None:
    verdicts = verdicts_on(name)
    troubles = [verdict for verdict in verdicts if verdict.severity is not Severity.NOTE]
    assert [verdict.title for verdict in troubles or verdicts[:1]] == VERDICTS[name]


def test_numbers() -> None:
    assert "318 tokens and have 104" in verdicts_on("gsm8k_sft")[0].evidence
    assert "2,048 tokens, the mean is 112" in verdicts_on("math_8")[0].evidence
    noise = verdicts_on("countdown_entropy")[0]
    assert "from 0.59 to 5.9" in noise.evidence and "it is 0.01" in noise.remedy
    assert "23.8 % at step 120 and is 8.2 % now" in verdicts_on("countdown_8")[0].evidence
    fall = verdicts_on("klong_sft_rl")[0]
    assert "94.2 % at step 40 and is 84 % now" in fall.evidence and "near step 40" in fall.remedy
    assert "+64.8 points since the start, but now only 13.5 %" in verdicts_on("klong")[0].evidence
    assert "from 4.83 % to 25 %" in verdicts_on("klong_problems")[0].evidence


def test_passes_over_few_problems_are_told() -> None:
    kept = json.loads((RUNS / "klong_problems.json").read_text(encoding="utf-8"))
    rows = rows_of(kept["rows"])
    for row in rows:
        row["epoch"] = row["step"] * 16 / 20
    assert "seen 32 times" in diagnose(rows, rows_of(kept["evals"]), kept["config"])[0].evidence
