"""`whet serve CONFIG`: the servers that a configuration wants, with the right flags, kept up, and stopped.

One server for each entry of server_devices, or one. They serve any run of the same model, one after the
other; a run sends its weights before it samples. Trains nothing.
"""

import contextlib
import functools
import logging
import signal
import sys
import time

from whetstone.config import Loaded
from whetstone.config.engine_traits import SERVER_ENGINES, engine_traits
from whetstone.engines.servers.setup import is_up, start_servers
from whetstone.errors import UserError

CHECK_EVERY_S = 1.0


def serve(loaded: Loaded) -> None:
    """Until Ctrl-C or SIGTERM; a server that dies is started again."""
    config = loaded.config
    if not engine_traits(config.rollout.rollout_engine).has_servers:
        raise UserError(
            f"rollout_engine is {config.rollout.rollout_engine}, which has no server: give "
            f"rollout_engine={' or '.join(SERVER_ENGINES)}."
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    host = config.engines.vllm_server_host or "127.0.0.1"
    count = max(1, len(config.engines.server_devices))
    ports = [config.engines.vllm_server_port + number for number in range(count)]
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has put us into the background
        signal.signal(number, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        processes = start_servers(config, host, ports)
        for process in processes:
            stack.callback(process.stop)
        for process in processes:
            process.wait_until_up(lambda one=process: is_up(one), config.engines.vllm_server_timeout)
        names = ",".join(process.command.url for process in processes)
        print(f"Up: {names}. Train with rollout_servers={names}; Ctrl-C stops.", flush=True)
        while True:
            time.sleep(CHECK_EVERY_S)
            for process in processes:
                if process.restart_if_dead(functools.partial(is_up, process)):
                    print(f"Up again: {process.command.url}.", flush=True)
