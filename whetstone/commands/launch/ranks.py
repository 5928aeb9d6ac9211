"""The ranks of a run as Ray actors: each is one `whet train` process that is told what torchrun would have
told it (RANK, WORLD_SIZE, MASTER_ADDR ...), and where the rollout servers are.

`run_once` is one attempt from beginning to end; it looks after the servers meanwhile (servers.py).
"""

import os
import subprocess
import sys
import time
from typing import Any

from whetstone.commands.launch.args import Launch
from whetstone.commands.launch.servers import Servers, on_bundle
from whetstone.engines.servers.http import free_port
from whetstone.engines.servers.process import popen_with_pdeathsig

ENDING_S = (
    90.0  # how long the others have to end by themselves when one has failed, or all to save when stopped
)
LAST_S = 10.0  # for those that have not
FAILED = 1


class Rank:
    """Runs inside a Ray actor: one `whet train` process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_point(self) -> tuple[str, int]:
        """An address of this machine and a port that is free there, for the first rank."""
        import ray  # pyright: ignore[reportMissingImports]

        return ray.util.get_node_ip_address(), free_port()

    def run(self, told: dict[str, str], words: list[str]) -> int:
        command = [sys.executable, "-m", "whetstone", "train", *words]
        self._process = popen_with_pdeathsig(command, env={**os.environ, **told})
        return self._process.wait()

    def end(self, grace_s: float) -> None:
        """SIGTERM, at which a rank finishes its step and saves; SIGKILL after `grace_s`."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_once(ray: Any, group: Any, asked: Launch, servers: Servers, attempt: int) -> int:
    """Run the ranks until all have ended; the first exit code that is not 0. The servers stay."""
    options = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "max_concurrency": 2}
    actors = [
        ray.remote(Rank).options(**options, **on_bundle(group, number)).remote()
        for number in range(asked.ranks)
    ]
    grace_s = ENDING_S
    try:
        address, port = ray.get(actors[0].meeting_point.remote())
        common = {
            "WORLD_SIZE": str(asked.ranks),
            "LOCAL_RANK": "0",  # Ray shows each actor its own GPU alone
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        words = [*asked.words, *servers.words]
        running = [
            actor.run.remote({**common, "RANK": str(rank)}, words) for rank, actor in enumerate(actors)
        ]
        code = _wait(ray, running, servers)
        grace_s = LAST_S  # they have had their time
        return code
    finally:
        ends = [actor.end.remote(grace_s) for actor in actors]
        ray.wait(ends, num_returns=len(ends), timeout=grace_s + LAST_S)
        for actor in actors:
            ray.kill(actor)


def _wait(ray: Any, running: list[Any], servers: Servers) -> int:
    """Until all ranks have ended, or some while after one has failed."""
    code, deadline = 0, None
    while running:
        done, running = ray.wait(running, num_returns=1, timeout=1.0)
        for one in done:
            try:
                ended = ray.get(one)
            except ray.exceptions.RayError as error:
                print(f"whet: a rank was lost with its machine ({error}).", flush=True)
                ended = FAILED
            code = code or ended
        if servers.look_after():
            return code or FAILED
        if code and deadline is None:
            deadline = time.monotonic() + ENDING_S
        if deadline is not None and time.monotonic() > deadline:
            break
    return code
