"""The placement group of a run on a Ray cluster, or a sentence that names the missing resources."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.commands.launch.args import LaunchArgs
from whetstone.errors import UserError

Resources = Mapping[str, float]
FIRST_WAIT_S = 5.0  # a cluster with room answers sooner


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


def reserve(ray: Any, args: LaunchArgs) -> Any:
    """A placement group with a bundle for each rank and then for each server."""
    group = ray.util.placement_group(args.bundles, strategy="PACK")
    if group.wait(min(FIRST_WAIT_S, args.wait_s)):
        return group
    if args.wait_s > FIRST_WAIT_S:
        print(f"whet: {_shortage(ray, args)} Waiting {args.wait_s:g} s for room (--wait).", flush=True)
        if group.wait(args.wait_s - FIRST_WAIT_S):
            return group
    ray.util.remove_placement_group(group)
    raise UserError(
        f"{_shortage(ray, args)} Lower --ranks or --servers, or what each needs: --cpus-per-rank, "
        "--cpus-per-server (0.5 is possible), --gpus-per-rank and --gpus-per-server (0: CPUs only)."
    )


def _shortage(ray: Any, args: LaunchArgs) -> str:
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return explain_shortage(args, ray.cluster_resources(), ray.available_resources(), machines)


def explain_shortage(args: LaunchArgs, has: Resources, free: Resources, machines: Sequence[Resources]) -> str:
    """The resources that the cluster lacks, in sentences."""
    requested = f"{args.ranks} ranks with {_describe(args.rank_bundle)} each"
    if args.servers:
        requested += f" and {args.servers} servers with {_describe(args.server_bundle)} each"
    sums = {name: sum(bundle.get(name, 0) for bundle in args.bundles) for name in ("CPU", "GPU")}
    parts = [
        f"{total:g} {name}s (it has {has.get(name, 0):g}, {free.get(name, 0):g} of them free)"
        for name, total in sums.items()
        if total
    ]
    text = f"The Ray cluster has no room for {requested}: that is {' and '.join(parts)}."
    for who, bundle in (("rank", args.rank_bundle), ("server", args.server_bundle)):
        alone = [machine for machine in machines if all(machine.get(k, 0) >= v for k, v in bundle.items())]
        if not alone and machines and (who == "rank" or args.servers):
            text += f" No machine of it is large enough for one {who} with {_describe(bundle)}."
    return text


def _describe(bundle: Resources) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in bundle.items())
