"""The cost model: held to the rows that benchmarks kept, its bytes counted by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.cost_tables import MEASURED
from whetstone.cost.step import H200, MODELS, Layout, Work, memory, predict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_what_the_cost_model_is_held_to_are_the_rows_that_were_kept():
    def rows(name, **wanted):
        kept = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        [row] = [row for row in kept if all(row.get(key) == value for key, value in wanted.items())]
        return row

    for (what, name, sequences), figure in MEASURED.items():
        size = name.lower()
        if what == "decode":
            row = rows("rollout", who="native", size=size, num_sequences=sequences, shape="full")
            assert row["tokens_per_s"] == figure
        elif what == "step":
            assert rows("step", who="ours", size=size)["total_s"] == pytest.approx(figure, rel=1e-3)
        else:
            row = rows("update", who="ours", size=size, setting="defaults", shape="ragged")
            found = row["tokens_run"] / row["seconds"] if what == "update" else row["peak_gb"]
            assert found == pytest.approx(figure, rel=2e-3)


def test_one_gpu_exchanges_nothing_and_eight_share_the_states():
    work = Work(prompts=8, group=1, prompt_tokens=1000, new_tokens=1000, checkpointing=False)
    single, eight = (predict(H200, MODELS["1.5B"], work, Layout(gpus=gpus)) for gpus in (1, 8))
    assert single.gather_s == single.exchange_s == 0 < eight.gather_s
    assert eight.memory < single.memory
    assert single.update_s / 8 <= eight.update_s < single.update_s / 4  # the fullest rank, and its own reads


@pytest.mark.parametrize(
    "layout, bytes_each",
    [
        (Layout(gpus=1), 2 + 2 + 8 + 4),  # upper halves, lower halves, moments, gradients
        (Layout(gpus=1, optim="adamw_8bit"), 2 + 2 + 2 + 8 / 256 + 4),
        (Layout(gpus=1, offload=True), 2 + 4),
        (Layout(gpus=4), (4 + 8 + 4) / 4 + 2 + 2 * 2 / 28),  # shards, the sampling copy, one layer twice
    ],
)
def test_bytes_of_a_parameter_in_the_cost_model(layout, bytes_each):
    work = Work(prompts=1, group=1, prompt_tokens=1, new_tokens=1, micro_batch_tokens=0)
    buckets = 2 * 64 * 2**20 if layout.offload else 0
    assert memory(MODELS["1.5B"], work, layout) == pytest.approx(bytes_each * 1.54e9 + buckets)
