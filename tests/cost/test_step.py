"""The cost model: held to the rows that benchmarks kept, its bytes counted by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.cost_tables import MEASURED, predicted, shape_of_size
from whetstone.cost.step import H200, Layout, Work, update_seconds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_cost_model_is_compared_with_the_kept_rows():
    def rows(name, **wanted):
        kept = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        [row] = [row for row in kept if all(row.get(key) == value for key, value in wanted.items())]
        return row

    for (what, name, sequences), figure in MEASURED.items():
        size = name.lower()
        if what == "decode":
            row = rows("rollout", who="native", size=size, num_sequences=sequences, shape="full")
            assert row["tokens_per_s"] == figure
        elif "vllm" in what or what == "ragged":
            who, shape = "vllm" if "vllm" in what else "native", "ragged" if "ragged" in what else "full"
            assert (
                rows("rollout", who=who, size=size, num_sequences=sequences, shape=shape)["seconds"] == figure
            )
        elif what == "step":
            assert rows("step", who="ours", size=size)["total_s"] == pytest.approx(figure, rel=1e-3)
        else:
            row = rows("update", who="ours", size=size, setting="defaults", shape="ragged")
            found = row["tokens_run"] / row["seconds"] if what == "update" else row["peak_gb"]
            assert found == pytest.approx(figure, rel=2e-3)


@pytest.mark.parametrize(("what", "size", "sequences"), MEASURED)
def test_predictions_are_near_the_measurements(what: str, size: str, sequences: int) -> None:
    """vLLM's host hides more of a 3B model than `max` says: 28 % too much in one of its rows."""
    bound = 0.3 if "vllm" in what else 0.2
    assert predicted(what, size, sequences) == pytest.approx(MEASURED[what, size, sequences], rel=bound)


def test_eight_gpus_share_the_update() -> None:
    shape = shape_of_size("1.5B")
    work = Work(prompts=8, group=1, prompt_tokens=1000, new_tokens=1000, checkpointing=False)
    single, eight = Layout(gpus=1), Layout(gpus=8)
    seconds = update_seconds(H200, shape, work, single)
    assert seconds / 8 <= update_seconds(H200, shape, work, eight) < seconds / 4  # the fullest rank
    # A sequence stays whole: no rank has less than one.
    many = update_seconds(H200, shape, work, Layout(gpus=64, replicas=8))
    assert many > 0.9 * update_seconds(H200, shape, work, eight)
