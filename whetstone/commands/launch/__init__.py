"""`whet launch --ray`: training ranks and rollout servers as Ray actors in one placement group."""

import argparse
import signal

from whetstone.commands.launch.args import LaunchArgs, launch_args, read_config, resolve_servers
from whetstone.commands.launch.args import add_arguments as add_arguments

DESCRIPTION = """
Place N ranks and M rollout servers in one placement group of the Ray cluster at RAY_ADDRESS (or on this
machine) and train on them. The arguments after `train` are those of whet train. A run that fails resumes
from its last checkpoint; a server that dies is restarted.
Without Ray: torchrun --nproc_per_node=8 -m whetstone train CONFIG (docs/scale.md).
"""
EXAMPLES = """
whet launch --ray --ranks 16 --max-restarts 3 train config/grpo.yaml tp_size=2
whet launch --ray --ranks 6 --servers 2 train config/grpo.yaml rollout_engine=vllm
whet launch --ray --ranks 2 --gpus-per-rank 0 train quickstart          on CPUs
"""
FINAL_CODES = (0, 2, 130)  # success, an error that the user must correct, Ctrl-C: no restart


def run(args: argparse.Namespace) -> int:
    return launch(launch_args(args))


def launch(args: LaunchArgs) -> int:
    """Place the ranks and servers, run them with restarts, and return the exit code."""
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
