"""Room on a Ray cluster: one placement group for all ranks and servers, or a sentence why there is none.

Joins the cluster at RAY_ADDRESS, or one on this machine, or starts Ray here. Runs nothing on it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.commands.launch.args import Launch
from whetstone.errors import UserError

Resources = Mapping[str, float]
AT_ONCE_S = 5.0  # a cluster with room answers sooner


def connect() -> Any:
    """Ray, connected."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("whet launch --ray needs Ray: run `pip install ray`, or use torchrun.") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        try:
            ray.init(address=address, log_to_driver=True)
        except ConnectionError:
            raise UserError(
                f"There is no Ray cluster at RAY_ADDRESS {address}: start one with `ray start --head`, or "
                "unset it to run on this machine."
            ) from None
    return ray


def place(ray: Any, asked: Launch) -> Any:
    """A placement group with a bundle for each rank and then for each server."""
    group = ray.util.placement_group(asked.bundles, strategy="PACK")
    if group.wait(min(AT_ONCE_S, asked.wait_s)):
        return group
    if asked.wait_s > AT_ONCE_S:
        print(f"whet: {_lack(ray, asked)} Waiting {asked.wait_s:g} s for room (--wait).", flush=True)
        if group.wait(asked.wait_s - AT_ONCE_S):
            return group
    ray.util.remove_placement_group(group)
    raise UserError(
        f"{_lack(ray, asked)} Lower --ranks or --servers, or what each needs: --cpus-per-rank, "
        "--cpus-per-server (0.5 is possible), --gpus-per-rank and --gpus-per-server (0: CPUs only)."
    )


def _lack(ray: Any, asked: Launch) -> str:
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return lack(asked, ray.cluster_resources(), ray.available_resources(), machines)


def lack(asked: Launch, has: Resources, free: Resources, machines: Sequence[Resources]) -> str:
    """What the cluster has too little of, in sentences."""
    wanted = f"{asked.ranks} ranks with {_words(asked.rank_bundle)} each"
    if asked.servers:
        wanted += f" and {asked.servers} servers with {_words(asked.server_bundle)} each"
    sums = {name: sum(bundle.get(name, 0) for bundle in asked.bundles) for name in ("CPU", "GPU")}
    parts = [
        f"{total:g} {name}s (it has {has.get(name, 0):g}, {free.get(name, 0):g} of them free)"
        for name, total in sums.items()
        if total
    ]
    text = f"The Ray cluster has no room for {wanted}: that is {' and '.join(parts)}."
    for who, bundle in (("rank", asked.rank_bundle), ("server", asked.server_bundle)):
        alone = [machine for machine in machines if all(machine.get(k, 0) >= v for k, v in bundle.items())]
        if not alone and machines and (who == "rank" or asked.servers):
            text += f" No machine of it is large enough for one {who} with {_words(bundle)}."
    return text


def _words(bundle: Resources) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in bundle.items())
