"""Memory on several ranks: a budget that all agree on, and a rank that runs out of it in mid-run.

There is no GPU here: the passes are real, run in step through FSDP and tensor-parallel layers, and what they
are said to take is a formula that differs from rank to rank.
"""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.distributed.launch import CONTEXT, free_port, run_on, set_environment
from tests.support.ranks import CPU, my_batches
from tests.support.update import make_samples, train_on, updater_for
from whetstone.config.sections import ModelConfig, ParallelConfig
from whetstone.errors import UserError
from whetstone.model.policy import Policy
from whetstone.model.sharded import shard_policy
from whetstone.parallel import fsdp, mesh
from whetstone.parallel.heartbeat import EXIT_CODE, Heartbeat
from whetstone.terminal.log import setup_logging
from whetstone.update.micro_batch_size import SHARDED_MEMORY_FRACTION, find_size
from whetstone.update.packing import pack

LAYERS = 4
# Bytes of the poorest rank -> tokens and layers run again (worked out in the test).
PLENTY, SOME, LITTLE = 1e9, 3294.0, 1140.0
CASES: dict[int, list[tuple[dict[str, Any], float]]] = {
    2: [({}, PLENTY), ({}, SOME), ({}, LITTLE), ({"tp_size": 2}, SOME)],
    4: [({"ddp_size": 2}, SOME), ({"tp_size": 2}, SOME), ({"tp_size": 2}, LITTLE)],
}


class Formula:
    """A gauge: 100 bytes, and for every token one in each layer, of which one run again keeps half."""

    def __init__(self, policy: Policy, size: float):
        self.policy, self.size, self.tokens, self.tried = policy, size, 0, []

    def takes(self, tokens: int, again: int) -> float:
        return 100 + tokens * (LAYERS - 0.5 * again)

    def peak_bytes(self, work: Any) -> float:
        work()
        again = sum(layer.gradient_checkpointing for layer in self.policy.trunk.layers)
        self.tried.append((self.tokens, again))
        taken = self.takes(self.tokens, again)
        assert taken <= self.size, "a real pass would have run out of memory"
        return taken

    def free(self) -> float:
        return self.size


def found_on(given: dict[str, Any], poor: float) -> dict[str, Any]:
    """The budget where the last rank has `poor` bytes and the others have plenty."""
    room = ParallelConfig(**given)
    ranks = mesh.make_ranks(room, "cpu")
    source = make_policy(num_hidden_layers=LAYERS) if ranks.is_main else None
    policy = shard_policy(source, ModelConfig(), room, ranks, CPU)
    before = [fsdp.local(parameter).clone() for parameter in policy.parameters()]
    updater = updater_for(policy)
    gauge: Any = Formula(policy, poor if ranks.rank == ranks.world_size - 1 else 1e9)
    rollouts = [sample.rollout for sample in make_samples(make_policy())] * 12 * ranks.data_size
    groups: list[Any] = [SimpleNamespace(rollouts=rollouts)]

    def attempt(batches: list[Any]) -> None:
        gauge.tokens = len(batches[0].token_ids)
        updater.trial_step(batches)

    try:
        budget = find_size(policy, attempt, groups, gauge, allow_checkpointing=True)
        found = (budget.tokens, budget.checkpointed_layers)
    except UserError as error:
        found = str(error)
    after = [fsdp.local(parameter) for parameter in policy.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    clean = all(parameter.grad is None for parameter in policy.parameters())
    return {"found": found, "tried": gauge.tried, "untouched": same and clean}


def find_all(cases: list[tuple[dict[str, Any], float]]) -> list[dict[str, Any]]:
    with mesh.start(ParallelConfig(), "cpu"):
        return [found_on(given, poor) for given, poor in cases]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_on_what_fits_the_poorest(num_ranks):
    """A step has 74 x 12 = 888 tokens for each data rank, in sequences of at most 16, padded on a CPU."""
    cases = CASES[num_ranks]
    everybody = run_on(num_ranks, find_all, cases)
    for number, (given, size) in enumerate(cases):
        results = [one[number] for one in everybody]
        for one in results:
            assert one["untouched"]
            assert (one["found"], one["tried"]) == (results[0]["found"], results[0]["tried"]), given
        tokens, again = results[0]["found"]
        if size == PLENTY:
            assert (tokens, again) == (888, None)
        elif size == SOME:  # room for 2,700 bytes of tokens: 3 for each with two of four layers run again
            assert (tokens, again) == (880, 2)
        else:  # room for 869 bytes of tokens, at least 2 for each
            assert again == LAYERS and 0.9 * 869 / 2 < tokens <= 869 / 2
            assert 100 + tokens * 2 <= SHARDED_MEMORY_FRACTION * size


def _fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")


def run_out(rank: int, port: int, folder: Any) -> None:
    """A step in which the second rank runs out of memory in the backward pass, while the first waits for
    it.
    """
    set_environment(rank, 2, port)
    with mesh.start(ParallelConfig(), "cpu") as ranks:
        setup_logging(folder / str(rank), is_main=ranks.is_main)
        with Heartbeat(ranks, timeout_s=20.0):
            policy = shard_policy(
                make_policy() if ranks.is_main else None, ModelConfig(), ParallelConfig(), ranks, CPU
            )
            updater = updater_for(policy, micro_batch_tokens=30)
            batches = my_batches(make_samples(make_policy()), ranks)
            rows = policy.completion_hidden

            def scarce(batch: Any) -> torch.Tensor:
                hidden = rows(batch)
                hidden.register_hook(_fail)
                return hidden

            if ranks.rank == 1:
                policy.completion_hidden = scarce
            train_on(updater, [batches])


def sharded_alone() -> str:
    """One rank whose weights FSDP has (cpu_offload: all on one GPU), and a backward pass that breaks off."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    policy = shard_policy(
        make_policy(), ModelConfig(), ParallelConfig(), mesh.make_ranks(ParallelConfig(), "cpu"), CPU
    )
    updater = updater_for(policy)
    rows = policy.completion_hidden

    def scarce(batch: Any) -> torch.Tensor:
        hidden = rows(batch)
        if len(batch.token_ids) > 40:  # halves would go through
            hidden.register_hook(_fail)
        return hidden

    policy.completion_hidden = scarce
    try:
        train_on(updater, [pack(make_samples(make_policy()), 1000)])
    except UserError as error:
        return str(error)
    return "went on"


def test_a_sharded_step_that_broke_off_is_not_begun_again():
    """FSDP's state would be that of a backward pass: gradients after it were wrong, without an error."""
    [said] = run_on(1, sharded_alone)
    assert said.startswith("The GPU's memory ran out in the update") and "micro_batch_tokens lower" in said


def test_a_rank_that_runs_out_of_memory_ends_all_with_its_reason(tmp_path):
    port, begun = free_port(), time.monotonic()
    pair = [CONTEXT.Process(target=run_out, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in pair:
        process.start()
    pair[0].join(timeout=60)
    took_s = time.monotonic() - begun
    for process in pair:
        process.kill()
        process.join()
    log = (tmp_path / "0" / "training.log").read_text()
    assert pair[0].exitcode == EXIT_CODE, log
    said = (
        r"This run ends because rank 1 on \S+ ended: The memory of rank 1's GPU ran out in the update "
        r"\(CUDA out of memory\. Tried to allocate 2\.00 GiB\): set micro_batch_tokens lower \(it was 30\), "
        r"gradient_checkpointing=true, optim=adamw_8bit or cpu_offload=optimizer\."
    )
    assert re.search(said, log), log
    assert took_s < 40  # it told the other: nobody waited for its heartbeat, nor for a collective to time out
