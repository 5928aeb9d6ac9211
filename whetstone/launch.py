"""`whet launch --ray`: the ranks of a training run as Ray actors in one placement group. Nothing else needs
Ray.

Each actor starts an ordinary `whet train` process with what torchrun would have told it (RANK, WORLD_SIZE,
MASTER_ADDR ...), so that training itself knows nothing of Ray. A run that fails is started again from its
last checkpoint, as often as `--max-restarts` says. Does not start a cluster: it joins the one that is
there, or runs on this machine.
"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from whetstone.errors import UserError

PLACING_S = 300  # how long to wait for a place on the cluster
ENDING_S = 90  # how long the others have to end by themselves when one has failed


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What `whet launch --ray` was asked for."""

    ranks: int
    gpus: float  # of each rank; 0: CPU only
    cpus: float
    max_restarts: int
    words: list[str]  # what follows `whet train`


FLAGS = {"--ranks": int, "--gpus-per-rank": float, "--cpus-per-rank": float, "--max-restarts": int}
USAGE = "`whet launch --ray --ranks 16 train CONFIG key=value ...`"


def parse(words: list[str]) -> Launch:
    """The command line after `whet launch`."""
    if not words or words[0] != "--ray":
        raise UserError(
            f"Only Ray is launched by whet itself: write {USAGE}, or use torchrun (docs/scale.md)."
        )
    given: dict[str, Any] = {}
    words = words[1:]
    while words and words[0].startswith("--"):
        flag, equals, value = words.pop(0).partition("=")
        if flag not in FLAGS:
            raise UserError(
                f"'{flag}' is not known to whet launch: it has {', '.join(FLAGS)}, as in {USAGE}."
            )
        if not equals:
            value = words.pop(0) if words else ""
        try:
            given[flag] = FLAGS[flag](value)
        except ValueError:
            raise UserError(f"{flag} needs a number, as in {USAGE}.") from None
    if not words or words[0] != "train":
        raise UserError(f"What shall be launched? Write {USAGE}.")
    if given.get("--ranks", 0) < 1:
        raise UserError(f"Say on how many ranks: {USAGE}.")
    return Launch(
        ranks=given["--ranks"],
        gpus=given.get("--gpus-per-rank", 1.0),
        cpus=given.get("--cpus-per-rank", 1.0),
        max_restarts=given.get("--max-restarts", 0),
        words=words[1:],
    )


class Rank:
    """Runs inside a Ray actor: one `whet train` process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def meeting_point(self) -> tuple[str, int]:
        """An address of this machine and a port that is free there, for the first rank."""
        import ray  # pyright: ignore[reportMissingImports]

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, told: dict[str, str], words: list[str]) -> int:
        command = [sys.executable, "-m", "whetstone", "train", *words]
        self._process = subprocess.Popen(command, env={**os.environ, **told})
        return self._process.wait()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def launch(words: list[str]) -> int:
    """Place the ranks, run them, and start them again where that was asked for; returns the exit code."""
    wanted = parse(words)
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=True)
    group = _place(ray, wanted)
    code = 1
    try:
        for attempt in range(wanted.max_restarts + 1):
            code = _run_once(ray, group, wanted, attempt)
            if code in (0, 2, 130):  # done, something the user must put right, stopped
                break
            print(
                f"whet: attempt {attempt + 1} of {wanted.max_restarts + 1} ended with exit code {code}.",
                flush=True,
            )
    finally:
        ray.util.remove_placement_group(group)
    return code


def _ray() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("whet launch --ray needs Ray: run `pip install ray`, or use torchrun.") from None
    return ray


def _place(ray: Any, wanted: Launch) -> Any:
    bundle = {"CPU": wanted.cpus, **({"GPU": wanted.gpus} if wanted.gpus else {})}
    group = ray.util.placement_group([bundle] * wanted.ranks, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACING_S)
    except ray.exceptions.GetTimeoutError:
        have = {name: int(ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU")}
        raise UserError(
            f"The cluster has no room for {wanted.ranks} ranks of {bundle} (it has {have}): lower --ranks, "
            "or set --gpus-per-rank 0 to train on CPUs."
        ) from None
    return group


def _run_once(ray: Any, group: Any, wanted: Launch, attempt: int) -> int:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore

    actors = []
    for number in range(wanted.ranks):
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
        made = ray.remote(Rank).options(
            num_cpus=wanted.cpus, num_gpus=wanted.gpus, scheduling_strategy=place, max_concurrency=2
        )
        actors.append(made.remote())
    address, port = ray.get(actors[0].meeting_point.remote())
    common = {
        "WORLD_SIZE": str(wanted.ranks),
        "LOCAL_RANK": "0",  # Ray shows each actor its own GPU alone
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    running = {
        actor.run.remote({**common, "RANK": str(rank)}, wanted.words): actor
        for rank, actor in enumerate(actors)
    }
    code, deadline = 0, None
    while running:
        done, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
        for one in done:
            del running[one]
            try:
                ended = ray.get(one)
            except ray.exceptions.RayError as error:
                print(f"whet: a rank was lost with its machine ({error}).", flush=True)
                ended = 1
            code = code or ended
        if code and deadline is None:
            deadline = time.monotonic() + ENDING_S
        if deadline is not None and time.monotonic() > deadline:
            break
    ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=10.0)
    for actor in actors:
        ray.kill(actor)
    return code
