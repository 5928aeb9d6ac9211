"""`whet launch --ray`: the ranks of a training run and its rollout servers as Ray actors in one placement
group. Nothing else needs Ray.

words.py: the command line; cluster.py: room on the cluster; servers.py, ranks.py: the actors. Training itself
knows nothing of Ray: a rank is an ordinary `whet train` process that is told the addresses of the servers. A
run that fails is started again from its last checkpoint, as often as `--max-restarts` says; its servers stay.
Does not start a cluster: it joins the one that is there, or runs on this machine.
"""

import signal

from whetstone.commands.launch.args import parse, read_config, settle_servers
from whetstone.commands.launch.cluster import connect, place
from whetstone.commands.launch.ranks import run_once
from whetstone.commands.launch.servers import Servers
from whetstone.run.folder import ensure_unused

NOT_AGAIN = (0, 2, 130)  # done, something the user must put right, stopped


def launch(words: list[str]) -> int:
    """Place the ranks and servers, run them, and start them again where that was asked for; returns the exit
    code.
    """
    asked = parse(words)
    config = read_config(asked.words)
    asked = settle_servers(asked, config)
    ensure_unused(config)  # now, not when everything has been placed and started
    ray = connect()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own: ranks save before they end
        signal.signal(number, signal.default_int_handler)
    group = place(ray, asked)
    servers = Servers(ray, group, asked)
    code = 1
    try:
        servers.start()
        for attempt in range(asked.max_restarts + 1):
            code = run_once(ray, group, asked, servers, attempt)
            if code in NOT_AGAIN:
                break
            print(
                f"whet: attempt {attempt + 1} of {asked.max_restarts + 1} ended with exit code {code}.",
                flush=True,
            )
    finally:
        servers.stop()
        ray.util.remove_placement_group(group)
    return code
