"""Build the server pool of a configuration: connect to running servers, or start them."""

import contextlib
import itertools
import logging
from pathlib import Path

from whetstone.config import Config
from whetstone.engines.servers.http import free_port
from whetstone.engines.servers.pool import ServerHandle, ServerPool, ServerSharing
from whetstone.engines.servers.process import ServerProcess
from whetstone.engines.servers.settings import max_slots
from whetstone.engines.servers.sglang import SGLangServer
from whetstone.engines.servers.sglang import command as sglang_command
from whetstone.engines.servers.vllm.server import VLLMServer
from whetstone.engines.servers.vllm.server import command as vllm_command
from whetstone.errors import UserError
from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")

# By rollout_engine.
CLIENTS = {"vllm": VLLMServer, "sglang": SGLangServer}
COMMANDS = {"vllm": vllm_command, "sglang": sglang_command}


def build_server_pool(config: Config, policy: Policy, sharing: ServerSharing | None = None) -> ServerPool:
    """`sharing`: the processes of the run, which all call this; the first starts servers if none is named."""
    engines, client_class = config.engines, CLIENTS[config.rollout.rollout_engine]
    addresses, processes = engines.addresses, []
    if not addresses:
        addresses, processes = _own_servers(config, sharing or ServerSharing())
    handles = []
    for number, (url, process) in enumerate(itertools.zip_longest(addresses, processes)):
        server = client_class(
            url,
            stops=policy.stop_token_ids,
            max_tokens=config.rollout.max_completion_length,
            weight_transfer=engines.weight_transfer,
            group_port=None if engines.server_group_port is None else engines.server_group_port + number,
            request_timeout_s=engines.server_request_timeout_s,
            is_shared=sharing is not None,
        )
        handles.append(ServerHandle(server, process))
    return ServerPool(
        handles,
        policy,
        max_in_flight=max_slots(config),
        timeout_s=engines.server_timeout_s,
        weight_dir=engines.weight_transfer_dir,
        trains_meanwhile=config.rollout.async_rollouts > 0,
        sharing=sharing,
    )


def _own_servers(config: Config, sharing: ServerSharing) -> tuple[list[str], list[ServerProcess]]:
    """The addresses of the started servers, and in the first process their processes."""
    processes, failure = [], None
    if sharing.is_leader:
        try:
            ports = [free_port() for _ in config.engines.server_devices or [""]]
            processes = start_servers(config, "127.0.0.1", ports)
        except UserError as error:
            failure = str(error)
    addresses, failure = sharing.broadcast(([process.command.url for process in processes], failure))
    if failure is not None:
        raise UserError(failure)
    return addresses, processes


def start_servers(config: Config, host: str, ports: list[int]) -> list[ServerProcess]:
    """Start one server for each entry of server_devices, or one, and wait until they answer."""
    devices: list[str | None] = [*config.engines.server_devices] or [None]
    processes = []
    with contextlib.ExitStack() as stack:  # if one cannot start, the others are stopped
        for number, (own, port) in enumerate(zip(devices, ports, strict=True)):
            processes.append(start_server(config, number, devices=own, host=host, port=port))
            stack.callback(processes[-1].stop)
        for process in processes:
            process.wait_until_up(config.engines.server_timeout_s)
        stack.pop_all()
    return processes


def start_server(config: Config, number: int, *, devices: str | None, host: str, port: int) -> ServerProcess:
    """`devices`: its own GPUs; its log is in the run folder."""
    folder = Path(config.run.output_dir) / (config.run.run_name or "") / "servers"
    log = (folder / f"server-{number}.log").resolve()
    make_command = COMMANDS[config.rollout.rollout_engine]
    process = ServerProcess(make_command(config, devices=devices, host=host, port=port), log)
    process.start()
    logger.info(f"Starting a {config.rollout.rollout_engine} server: {process.command.url}, {process.log}")
    return process
