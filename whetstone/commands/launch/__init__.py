"""`whet launch`: ranks on this machine by torchrun, or ranks and rollout servers in a Ray placement group."""

import argparse
import os
import signal

from whetstone.commands.launch.args import LaunchArgs, launch_args, read_config, resolve_servers
from whetstone.commands.launch.args import add_arguments as add_arguments

DESCRIPTION = """
Train on N ranks of this machine, as `torchrun --standalone --nproc_per_node=N -m whetstone train` does. The
arguments after `train` are those of whet train. A run that fails resumes from its last checkpoint.
--ray places the ranks and M rollout servers in one placement group of the Ray cluster at RAY_ADDRESS (or on
this machine); a server that dies is restarted. Several machines without Ray: docs/scale.md.
"""
EXAMPLES = """
whet launch --ranks 8 train config/grpo.yaml tp_size=2
whet launch --ranks 2 --share-gpu train quickstart                      tests on one GPU
whet launch --ray --ranks 16 --max-restarts 3 train config/grpo.yaml tp_size=2
whet launch --ray --ranks 6 --servers 2 train config/grpo.yaml rollout_engine=vllm
whet launch --ray --ranks 2 --gpus-per-rank 0 train quickstart          on CPUs
"""
FINAL_CODES = (0, 2, 130)  # success, an error that the user must correct, Ctrl-C: no restart


def run(args: argparse.Namespace) -> int:
    return launch(launch_args(args))


def launch(args: LaunchArgs) -> int:
    """Place the ranks and servers, run them with restarts, and return the exit code."""
    if not args.ray:
        return _launch_here(args)
    from whetstone.commands.launch.cluster import connect, reserve
    from whetstone.commands.launch.ranks import run_once
    from whetstone.commands.launch.servers import Servers
    from whetstone.run.folder import ensure_unused

    config = read_config(args.train_args)
    args = resolve_servers(args, config)
    ensure_unused(config)  # before everything is placed and started
    ray = connect()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own: ranks save before they end
        signal.signal(number, signal.default_int_handler)
    group = reserve(ray, args)
    servers = Servers(ray, group, args)
    code = 1
    try:
        servers.start()
        for attempt in range(args.max_restarts + 1):
            code = run_once(ray, group, args, servers, attempt)
            if code in FINAL_CODES:
                break
            attempts = f"{attempt + 1} of {args.max_restarts + 1}"
            print(f"whet: attempt {attempts} ended with exit code {code}.", flush=True)
    finally:
        servers.stop()
        ray.util.remove_placement_group(group)
    return code


def _launch_here(args: LaunchArgs) -> int:
    from whetstone.parallel.local_ranks import SHARE_GPU, torchrun
    from whetstone.run.folder import ensure_unused

    ensure_unused(read_config(args.train_args))  # the sentence once, before anything is started
    if args.share_gpu:
        os.environ[SHARE_GPU] = "1"
    return torchrun(args.ranks, args.max_restarts, ["train", *args.train_args])
