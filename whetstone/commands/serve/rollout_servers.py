"""`whet serve CONFIG`: start the rollout servers of a configuration until Ctrl-C; restart dead ones."""

import contextlib
import logging
import signal
import sys
import time

from whetstone.config import Config
from whetstone.config.engine_traits import SERVER_ENGINES, engine_traits
from whetstone.engines.servers.setup import start_servers
from whetstone.errors import UserError
from whetstone.tasks.registry import with_room_for_turns

CHECK_EVERY_S = 1.0


def serve_rollouts(config: Config) -> None:
    """Run until Ctrl-C or SIGTERM."""
    if not engine_traits(config.rollout.rollout_engine).has_servers:
        raise UserError(
            f"rollout_engine is {config.rollout.rollout_engine}, which has no server: give "
            f"rollout_engine={' or '.join(SERVER_ENGINES)}; or name the run of a model to serve, such as "
            "outputs/quickstart."
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    host = config.engines.server_host or "127.0.0.1"
    count = max(1, len(config.engines.server_devices))
    ports = [config.engines.server_port + number for number in range(count)]
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has put us into the background
        signal.signal(number, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        processes = start_servers(with_room_for_turns(config), host, ports)
        for process in processes:
            stack.callback(process.stop)
        names = ",".join(process.command.url for process in processes)
        print(f"Up: {names}. Train with rollout_servers={names}; Ctrl-C stops.", flush=True)
        while True:
            time.sleep(CHECK_EVERY_S)
            for process in processes:
                process.restart_if_dead()
                if process.has_recovered():
                    print(f"Up again: {process.command.url}.", flush=True)
