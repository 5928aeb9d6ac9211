"""Training ranks as Ray actors: each runs one `whet train` process with torchrun's environment variables."""

import os
import subprocess
import sys
import time
from typing import Any

from whetstone.commands.launch.args import LaunchArgs
from whetstone.commands.launch.servers import Servers, on_bundle
from whetstone.engines.servers.http import free_port
from whetstone.engines.servers.process import popen_with_pdeathsig

# For the other ranks to end by themselves when one has failed, or for all to save when stopped.
SHUTDOWN_S = 90.0
KILL_AFTER_S = 10.0  # for those that have not ended by then
FAILED = 1


class Rank:
    """Runs inside a Ray actor: one `whet train` process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def rendezvous_address(self) -> tuple[str, int]:
        """The address of this machine and a free port on it."""
        import ray  # pyright: ignore[reportMissingImports]

        return ray.util.get_node_ip_address(), free_port()

    def run(self, env: dict[str, str], train_args: list[str]) -> int:
        command = [sys.executable, "-m", "whetstone", "train", *train_args]
        self._process = popen_with_pdeathsig(command, env={**os.environ, **env})
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


def run_once(ray: Any, group: Any, args: LaunchArgs, servers: Servers, attempt: int) -> int:
    """Run the ranks until all have ended; the first exit code that is not 0. The servers stay."""
    options = {"num_cpus": args.cpus, "num_gpus": args.gpus, "max_concurrency": 2}
    remote = ray.remote(Rank).options
    actors = [remote(**options, **on_bundle(group, number)).remote() for number in range(args.ranks)]
    grace_s = SHUTDOWN_S
    try:
        address, port = ray.get(actors[0].rendezvous_address.remote())
        common = {
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_RANK": "0",  # Ray shows each actor its own GPU alone
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        train_args = [*args.train_args, *servers.settings]
        envs = [{**common, "RANK": str(rank)} for rank in range(args.ranks)]
        running = [actor.run.remote(env, train_args) for actor, env in zip(actors, envs, strict=True)]
        code = _wait(ray, running, servers)
        grace_s = KILL_AFTER_S  # they have had their time
        return code
    finally:
        ends = [actor.end.remote(grace_s) for actor in actors]
        ray.wait(ends, num_returns=len(ends), timeout=grace_s + KILL_AFTER_S)
        for actor in actors:
            ray.kill(actor)


def _wait(ray: Any, running: list[Any], servers: Servers) -> int:
    """Until all ranks have ended, or some while after one has failed."""
    code, deadline = 0, None
    while running:
        done, running = ray.wait(running, num_returns=1, timeout=1.0)
        for result in done:
            try:
                exit_code = ray.get(result)
            except ray.exceptions.RayError as error:
                print(f"whet: a rank was lost with its machine ({error}).", flush=True)
                exit_code = FAILED
            code = code or exit_code
        if servers.look_after():
            return code or FAILED
        if code and deadline is None:
            deadline = time.monotonic() + SHUTDOWN_S
        if deadline is not None and time.monotonic() > deadline:
            break
    return code
