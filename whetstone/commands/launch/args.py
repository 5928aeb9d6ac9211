"""Arguments of `whet launch`: how many ranks and servers, with how many GPUs and CPUs each. No Ray here."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser, source_and_settings
from whetstone.config import Config, load
from whetstone.config.engine_traits import engine_traits
from whetstone.engines import check_shared_servers
from whetstone.errors import UserError

PLACEMENT_TIMEOUT_S = 300.0
USAGE = "`whet launch --ray --ranks 16 train CONFIG key=value ...`"


@dataclass(frozen=True, kw_only=True)
class LaunchArgs:
    """The resources of a run."""

    ranks: int
    gpus: float = 1.0  # of each rank; 0: CPU only
    cpus: float = 1.0
    servers: int | None = None  # None: as many as the configuration needs
    gpus_per_server: int | None = None  # None: as many as it spreads the model over
    cpus_per_server: float = 1.0
    max_restarts: int = 0
    wait_s: float = PLACEMENT_TIMEOUT_S  # for free resources on the cluster
    train_args: list[str]  # what follows `whet train`

    @property
    def rank_bundle(self) -> dict[str, float]:
        return _bundle(self.cpus, self.gpus)

    @property
    def server_bundle(self) -> dict[str, float]:
        return _bundle(self.cpus_per_server, self.gpus_per_server or 0)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Of the ranks, then of the servers."""
        return [self.rank_bundle] * self.ranks + [self.server_bundle] * (self.servers or 0)


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}


def add_arguments(parser: CommandParser) -> None:
    count, number = _number(int), _number(float)
    parser.add_argument("--ray", action="store_true", help="use Ray, the only launcher so far (required)")
    parser.add_argument("--ranks", type=count, default=0, metavar="N", help="training processes (required)")
    parser.add_argument("--gpus-per-rank", type=number, default=1.0, metavar="N", help="0: train on CPUs")
    parser.add_argument("--cpus-per-rank", type=number, default=1.0, metavar="N", help="may be a fraction")
    parser.add_argument(
        "--servers",
        type=count,
        metavar="N",
        help="servers of rollout_engine vllm or sglang (default: 1, or those that rollout_servers names); "
        "0: the first rank starts one",
    )
    parser.add_argument(
        "--gpus-per-server", type=count, metavar="N", help="default: server_tensor_parallel_size"
    )
    parser.add_argument("--cpus-per-server", type=number, default=1.0, metavar="N")
    parser.add_argument("--max-restarts", type=count, default=0, metavar="N", help="restarts after a failure")
    parser.add_argument(
        "--wait",
        type=number,
        default=PLACEMENT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long to wait for free resources (default: 300)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train [CONFIG] [key=value ...]")


def launch_args(args: argparse.Namespace) -> LaunchArgs:
    """The parsed command line as `LaunchArgs`; `UserError` for what is missing."""
    if not args.ray:
        raise UserError(
            f"Only Ray is launched by whet itself: write {USAGE}, or use torchrun (docs/scale.md)."
        )
    if args.command[:1] != ["train"]:
        raise UserError(f"Say what to launch: write {USAGE}.")
    if args.ranks < 1:
        raise UserError(f"Say on how many ranks to train: write {USAGE}.")
    return LaunchArgs(
        ranks=args.ranks,
        gpus=args.gpus_per_rank,
        cpus=args.cpus_per_rank,
        servers=args.servers,
        gpus_per_server=args.gpus_per_server,
        cpus_per_server=args.cpus_per_server,
        max_restarts=args.max_restarts,
        wait_s=args.wait,
        train_args=args.command[1:],
    )


def _number(kind: type) -> Callable[[str], float]:
    """An argparse type: a finite number of at least 0."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not 0 <= value < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{text[:50]}' is not {what} of at least 0")
        return value

    return convert


def read_config(train_args: list[str]) -> Config:
    """The configuration that the ranks will load from the same arguments."""
    from whetstone.commands import train

    source, settings = source_and_settings(CommandParser("train", train).parse(train_args))
    return load(source or DEFAULT_RECIPE, settings).config


def resolve_servers(args: LaunchArgs, config: Config) -> LaunchArgs:
    """Fill in the number of servers and of their GPUs; `UserError` where the configuration forbids them."""
    engine, engines = config.rollout.rollout_engine, config.engines
    has_servers = engine_traits(engine).has_servers
    if not has_servers or config.rollout.vllm_mode == "colocate":
        if args.servers:
            sampler = f"{engine} in the ranks' own processes" if has_servers else engine
            raise UserError(
                f"--servers {args.servers} places rollout servers, but {sampler} samples here, which needs "
                "none: add rollout_engine=vllm vllm_mode=server after `train`, or leave --servers out."
            )
        return replace(args, servers=0)
    if engines.addresses:
        if args.servers:
            raise UserError(
                f"--servers {args.servers} starts rollout servers, but the configuration names running ones "
                f"({engines.addresses[0]}): leave out one of the two."
            )
        return replace(args, servers=0)
    if args.servers == 0:  # the first rank starts its own beside it
        return args
    if engines.server_devices:
        raise UserError(
            "server_devices names GPUs, but here Ray chooses them: leave it out, and say how many servers "
            f"there shall be with --servers {len(engines.server_devices)}."
        )
    spread = engines.server_tensor_parallel_size
    gpus = args.gpus_per_server
    if gpus is None:
        gpus = spread if args.gpus else 0
    if gpus not in (0, spread):
        raise UserError(
            f"--gpus-per-server is {gpus}, but server_tensor_parallel_size spreads the model over {spread}: "
            f"give server_tensor_parallel_size={gpus}, or leave --gpus-per-server out."
        )
    if args.ranks > 1:
        check_shared_servers(config)
    return replace(args, servers=args.servers or 1, gpus_per_server=gpus)
