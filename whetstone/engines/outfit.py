"""A configuration -> its fleet: servers that are running, or such that are started for this run.

Chooses between vLLM and SGLang, gives started servers ports, GPUs and logs. The fleet itself: fleet.py.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from whetstone.config import Config
from whetstone.engines.fleet import Fleet, Member
from whetstone.engines.http import free_port
from whetstone.engines.launch import Command, ServerProcess
from whetstone.engines.servers import Server
from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")


def make_fleet(config: Config, policy: Policy) -> Fleet:
    engines = config.engines
    addresses, processes = engines.addresses, []
    if not addresses:
        ports = [free_port() for _ in engines.server_devices or [""]]
        processes = start_servers(config, "127.0.0.1", ports)
        addresses = [process.command.url for process in processes]
    make = server_maker(config, policy)
    members = [Member(server=make(url, index)) for index, url in enumerate(addresses)]
    with contextlib.ExitStack() as stack:  # a server that can't start takes the others with it
        for process in processes:
            stack.callback(process.stop)
        for member, process in zip(members, processes, strict=False):
            process.wait_until_up(member.server.is_healthy, engines.vllm_server_timeout)
            member.process = process
        stack.pop_all()
    return Fleet(
        members,
        policy,
        max_in_flight=config.rollout.max_slots,
        timeout_s=engines.vllm_server_timeout,
        weight_dir=engines.weight_transfer_dir,
    )


def server_maker(config: Config, policy: Policy) -> Callable[[str, int], Server]:
    """A function of (address, number) that makes the client of a server."""
    engines = config.engines

    def make(url: str, index: int) -> Server:
        port = None if engines.vllm_group_port is None else engines.vllm_group_port + index
        if config.rollout.rollout_engine == "sglang":
            from whetstone.engines.sglang import SGLangServer as Client
        else:
            from whetstone.engines.vllm.server import VLLMServer as Client
        return Client(
            url,
            stops=policy.stop_token_ids,
            max_tokens=config.rollout.max_completion_length,
            weight_transfer=engines.weight_transfer,
            group_port=port,
            request_timeout_s=engines.server_request_timeout,
        )

    return make


def start_servers(config: Config, host: str, ports: list[int]) -> list[ServerProcess]:
    """One server for each entry of server_devices, or one; they come up side by side."""
    devices: list[str | None] = [*config.engines.server_devices] or [None]
    folder = Path(config.run.output_dir) / (config.run.run_name or "") / "servers"
    processes = []
    for index, (own, port) in enumerate(zip(devices, ports, strict=True)):
        process = ServerProcess(
            server_command(config, own, host, port), (folder / f"server-{index}.log").resolve()
        )
        process.start()
        logger.info(
            f"Starting a {config.rollout.rollout_engine} server: {process.command.url}, {process.log}"
        )
        processes.append(process)
    return processes


def server_command(config: Config, devices: str | None, host: str, port: int) -> Command:
    if config.rollout.rollout_engine == "sglang":
        from whetstone.engines.sglang import command
    else:
        from whetstone.engines.vllm.command import command
    return command(config, devices=devices, host=host, port=port)
