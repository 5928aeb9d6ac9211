"""A configuration -> its fleet: servers that are running, or such that are started for this run.

Chooses between vLLM and SGLang, gives started servers ports, GPUs and logs. The fleet itself: fleet.py.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from whetstone.config import Config
from whetstone.engines.servers.client import HEALTH_TIMEOUT_S, MAX_SLOTS, Server
from whetstone.engines.servers.http import Calls, Refused, Unreachable, free_port
from whetstone.engines.servers.pool import Fleet, Member, Team
from whetstone.engines.servers.process import Command, ServerProcess
from whetstone.errors import UserError
from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")


def make_fleet(config: Config, policy: Policy, team: Team | None = None) -> Fleet:
    """`team`: the processes of the run, all of which call this; the first starts servers where none is
    named.
    """
    engines = config.engines
    addresses, processes = engines.addresses, []
    if not addresses:
        addresses, processes = _own_servers(config, team or Team())
    make = server_maker(config, policy, is_shared=team is not None)
    members = [Member(server=make(url, index)) for index, url in enumerate(addresses)]
    for member, process in zip(members, processes, strict=False):
        member.process = process
    return Fleet(
        members,
        policy,
        max_in_flight=config.rollout.max_num_seqs or MAX_SLOTS,
        timeout_s=engines.server_timeout_s,
        weight_dir=engines.weight_transfer_dir,
        policy_moves=config.rollout.async_rollouts > 0,
        team=team,
    )


def _own_servers(config: Config, team: Team) -> tuple[list[str], list[ServerProcess]]:
    """Addresses for every process of the team, and the processes of the servers for the first."""
    processes, failure = [], None
    if team.leads:
        try:
            processes = _start_and_wait(config)
        except UserError as error:
            failure = str(error)
    addresses, failure = team.tell(([process.command.url for process in processes], failure))
    if failure is not None:
        raise UserError(failure)
    return addresses, processes


def _start_and_wait(config: Config) -> list[ServerProcess]:
    ports = [free_port() for _ in config.engines.server_devices or [""]]
    processes = start_servers(config, "127.0.0.1", ports)
    with contextlib.ExitStack() as stack:  # a server that can't start takes the others with it
        for process in processes:
            stack.callback(process.stop)
        for process in processes:
            process.wait_until_up(lambda one=process: is_up(one), config.engines.server_timeout_s)
        stack.pop_all()
    return processes


def is_up(process: ServerProcess) -> bool:
    try:
        Calls(process.command.url).get("/health", timeout_s=HEALTH_TIMEOUT_S)
    except (Unreachable, Refused):
        return False
    return True


def server_maker(config: Config, policy: Policy, *, is_shared: bool = False) -> Callable[[str, int], Server]:
    """A function of (address, number) that makes the client of a server."""
    engines = config.engines

    def make(url: str, index: int) -> Server:
        port = None if engines.server_group_port is None else engines.server_group_port + index
        if config.rollout.rollout_engine == "sglang":
            from whetstone.engines.servers.sglang import SGLangServer as Client
        else:
            from whetstone.engines.servers.vllm.server import VLLMServer as Client
        return Client(
            url,
            stops=policy.stop_token_ids,
            max_tokens=config.rollout.max_completion_length,
            weight_transfer=engines.weight_transfer,
            group_port=port,
            request_timeout_s=engines.server_request_timeout_s,
            is_shared=is_shared,
        )

    return make


def start_servers(config: Config, host: str, ports: list[int]) -> list[ServerProcess]:
    """One server for each entry of server_devices, or one; they come up side by side."""
    devices: list[str | None] = [*config.engines.server_devices] or [None]
    return [
        start_server(config, number, devices=own, host=host, port=port)
        for number, (own, port) in enumerate(zip(devices, ports, strict=True))
    ]


def start_server(config: Config, number: int, *, devices: str | None, host: str, port: int) -> ServerProcess:
    """`devices`: GPUs of its own; its log is in the folder of the run."""
    folder = Path(config.run.output_dir) / (config.run.run_name or "") / "servers"
    log = (folder / f"server-{number}.log").resolve()
    process = ServerProcess(server_command(config, devices, host, port), log)
    process.start()
    logger.info(f"Starting a {config.rollout.rollout_engine} server: {process.command.url}, {process.log}")
    return process


def keep_up(process: ServerProcess) -> str | None:
    """Start a server again if it has died (`UserError` if that is of no use); a word when it is up again."""
    process.keep_running()
    if process.restarts and is_up(process):
        process.restarts = 0
        return f"Up again: {process.command.url}."
    return None


def server_command(config: Config, devices: str | None, host: str, port: int) -> Command:
    if config.rollout.rollout_engine == "sglang":
        from whetstone.engines.servers.sglang import command
    else:
        from whetstone.engines.servers.vllm.command import command
    return command(config, devices=devices, host=host, port=port)
