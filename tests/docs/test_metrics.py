"""docs/metrics.md names exactly the metrics that real runs log."""

import json
import re
from pathlib import Path

import pytest

from whetstone.config import load
from whetstone.train import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SMALL = [
    "max_steps=2", "prompts_per_step=2", "num_generations=2", "max_completion_length=16", "reward_workers=1",
    "eval_num_samples=0", "save_strategy=no", "preflight=off",
]  # fmt: skip
RUNS = {
    "rl": [
        "eval_num_samples=2", "eval_samples_per_problem=2", "fixed_eval_steps=1", "peak_tflops=1",
        "dynamic_sampling=true", "async_rollouts=1", "advantage=gae", "beta=0.1", "target_kl=0.1",
        "entropy_target=0.5", "off_policy_mask_threshold=0.5",
        "mask_truncated_completions=true", "top_entropy_quantile=0.5",
        "datasets={chain_sum: {curriculum: true}}",
    ],
    "turns": ["datasets={guess_number: {}}"],
    "star": ["loss_type=sft", "rejection_sampling=true", "num_generations=8"],
}  # fmt: skip
# Of code tasks, of an automatic choice on a GPU, and of a GPU with NVML.
ELSEWHERE = {
    "programs/<outcome>_ratio",
    "checkpointed_layers",
    "gpu/utilization_ratio",
    "gpu/memory_used_gb",
}


def documented() -> set[str]:
    """The names in front of the colon of every entry."""
    entries = re.findall(r"^- ((?:`[^`]+`,?\s+)*`[^`]+`):", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for entry in entries for name in re.findall(r"`([^`]+)`", entry)}


def page_name(metric: str) -> str:
    """The name under which the page has a metric: `rewards/accuracy/mean` is `rewards/<part>/mean`."""
    for pattern, name in (
        (r"rewards/.+/(mean|std)", r"rewards/<part>/\1"),
        (r"accuracy/.+", "accuracy/<task>"),
        (r"curriculum/.+/level", "curriculum/<task>/level"),
        (r"pass@\d+", "pass@<k>"),
    ):
        if re.fullmatch(pattern, metric):
            return re.sub(pattern, name, metric)
    return metric


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("runs")
    names: set[str] = set()
    for name, settings in RUNS.items():
        train(load("quickstart", [*SMALL, *settings, f"output_dir={folder}", f"run_name={name}"]))
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        names |= {page_name(key) for row in rows for key in row} - {"step", "kind"}
    return names


def test_every_logged_metric_is_documented(logged: set[str]) -> None:
    assert sorted(logged - documented()) == []


def test_every_documented_metric_is_logged(logged: set[str]) -> None:
    assert sorted(documented() - logged - ELSEWHERE) == []
