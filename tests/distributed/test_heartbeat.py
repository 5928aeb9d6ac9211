"""A rank that fails, dies or hangs brings the other down with its reason, soon."""

import os
import re
import signal
import time

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.distributed.launch import CONTEXT, free_port, set_environment
from whetstone.config.sections import ParallelConfig
from whetstone.parallel import mesh
from whetstone.parallel.collectives import all_reduce_ranks
from whetstone.parallel.heartbeat import EXIT_CODE, Heartbeat
from whetstone.terminal.log import setup_logging

SILENT = r"This run ends because rank 1 on \S+ has not been heard of for \d+ s: it died or was cut off\."
REASONS = {
    "raise": r"This run ends because rank 1 on \S+ ended: the fourth layer is missing\.",
    "kill": SILENT,
    "kill, slow rounds": SILENT,
    "stop": SILENT,
}
TIMEOUT_S, SLOW_S = 3.0, 1.0


class SlowHeartbeat(Heartbeat):
    """As on a machine that is busy: a dead rank is found later than timeout and pauses add up to."""

    def _check_ranks(self, store, seen) -> None:
        time.sleep(SLOW_S)
        super()._check_ranks(store, seen)


def work(rank: int, port: int, how: str, folder) -> None:
    """The first rank waits in a collective for the second, which does something worse."""
    set_environment(rank, 2, port)
    with mesh.start(ParallelConfig(), "cpu") as ranks:
        setup_logging(folder / str(rank), is_main=ranks.is_main)
        kind = SlowHeartbeat if "slow" in how else Heartbeat
        with kind(ranks, timeout_s=TIMEOUT_S):
            all_reduce_ranks(ranks, torch.zeros(1))
            if ranks.rank == 1 and how == "raise":
                raise ValueError("the fourth layer is missing")
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
            all_reduce_ranks(ranks, torch.zeros(1))
            time.sleep(100)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """All ways to go at once: what the first rank logged, its exit code, and how long it took."""
    pairs, found, begun = {}, {}, time.monotonic()
    for how in REASONS:
        folder, port = tmp_path_factory.mktemp(how), free_port()
        pair = [CONTEXT.Process(target=work, args=(rank, port, how, folder)) for rank in range(2)]
        for process in pair:
            process.start()
        pairs[how] = (pair, folder)
    for how, (pair, folder) in pairs.items():
        pair[0].join(timeout=100)
        log = (folder / "0" / "training.log").read_text()
        found[how] = (log, pair[0].exitcode, time.monotonic() - begun)
        for process in pair:
            process.kill()
            process.join()
    return found


@pytest.mark.parametrize("how", REASONS)
def test_the_other_rank_ends_with_the_reason(ended, how):
    log, code, took_s = ended[how]
    assert code == EXIT_CODE, log
    assert re.search(REASONS[how], log), log
    assert "auto_resume=true" in log
    assert took_s < 60


def attempt(rank: int, port: int, number: int, results) -> None:
    set_environment(rank, 2, port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(number)}
    time.sleep(
        6 * number * rank
    )  # the first rank of the second attempt looks for the other before it is there
    with mesh.start(ParallelConfig(), "cpu") as ranks:
        results.put(all_reduce_ranks(ranks, torch.ones(1)).item())


def test_ranks_restarted_by_torchrun_find_each_other():
    """It keeps the addresses of the ranks that are gone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in range(2):
        results = CONTEXT.Queue()
        pair = [
            CONTEXT.Process(target=attempt, args=(rank, store.port, number, results)) for rank in range(2)
        ]
        for process in pair:
            process.start()
        for process in pair:
            process.join(timeout=60)
        assert [process.exitcode for process in pair] == [0, 0]
        assert results.get(timeout=10) == results.get(timeout=10) == 2.0
