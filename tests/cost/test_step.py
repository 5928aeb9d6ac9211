"""The cost model: held to the rows that benchmarks kept, its bytes counted by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.cost_tables import MEASURED, predicted, shape_of_size
from whetstone.cost.step import (
    H200,
    Layout,
    Work,
    exchange_seconds,
    gather_seconds,
    transfer_seconds,
    update_seconds,
)

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


def test_one_gpu_exchanges_nothing_and_eight_share_the_update() -> None:
    shape = shape_of_size("1.5B")
    work = Work(prompts=8, group=1, prompt_tokens=1000, new_tokens=1000, checkpointing=False)
    single, eight, sixteen = (Layout(gpus=gpus) for gpus in (1, 8, 16))
    assert gather_seconds(H200, 1e9, single) == exchange_seconds(H200, work, eight) == 0
    assert gather_seconds(H200, 1e9, eight) == pytest.approx(7 / 8 * 1e9 / 350e9)
    # 8 x 1,000 tokens of 24 bytes to each of 8 ranks of a host
    assert exchange_seconds(H200, work, sixteen) == pytest.approx(8 * 1000 * 24 * 8 / 2e9)
    seconds = update_seconds(H200, shape, work, single)
    assert seconds / 8 <= update_seconds(H200, shape, work, eight) < seconds / 4  # the fullest rank
    # A sequence stays whole: no rank has less than one.
    many = update_seconds(H200, shape, work, Layout(gpus=64, replicas=8))
    assert many > 0.9 * update_seconds(H200, shape, work, eight)


def test_weights_go_to_each_server_in_turn() -> None:
    alone = Layout(gpus=1)
    assert transfer_seconds(H200, 7e9, alone, servers=7, tp=1) == pytest.approx(7 * 7e9 / 350e9)
    assert transfer_seconds(H200, 7e9, alone, servers=2, tp=4) == pytest.approx(2 * 7e9 / 42e9)  # two hosts
    gathered = 15 / 16 * 7e9 / 42e9
    assert transfer_seconds(H200, 7e9, Layout(gpus=16), servers=1, tp=8) == pytest.approx(
        gathered + 7e9 / 42e9
    )
