"""Run a function in several processes that a launcher might have started, and get back what each returned."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.forkserver import CONTEXT


def run_on(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240
) -> list[Any]:
    """`function(*arguments)` in each of `num_ranks` processes; fails with the first traceback there is."""
    port = free_port()
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_work, args=(rank, num_ranks, port, results, function, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted((results.get(timeout=timeout_s) for _ in processes), key=lambda result: result[0])
        failures = [f"rank {rank}:\n{failure}" for rank, failure, _ in found if failure is not None]
        # One that lost its connection is no cause, if there is another.
        causes = [failure for failure in failures if "by peer" not in failure] or failures
        assert not failures, causes[0]
        return [value for _, _, value in found]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def set_environment(rank: int, num_ranks: int, port: int) -> None:
    """What a launcher tells each process."""
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WHETSTONE_SHARE_GPU": "1",  # where tests are run on a GPU
    }


def _work(rank: int, num_ranks: int, port: int, results: Any, function: Any, arguments: Any) -> None:
    set_environment(rank, num_ranks, port)
    try:
        results.put((rank, None, function(*arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
