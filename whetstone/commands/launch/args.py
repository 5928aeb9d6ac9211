"""Arguments of `whet launch`: how many ranks and servers, with how many GPUs and CPUs each. No Ray here."""

import argparse
from dataclasses import dataclass, replace

from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser, number, source_and_settings
from whetstone.config import Config, load
from whetstone.config.engine_traits import engine_traits
from whetstone.engines import check_shared_servers
from whetstone.errors import UserError
from whetstone.parallel.local_ranks import shares_gpu

USAGE = "`whet launch --ranks 2 train CONFIG key=value ...`"
_SERVERS = "servers of rollout_engine vllm or sglang (default: 1, or those that rollout_servers names); "
OPTIONS = (
    ("--ranks", "ranks", int, 0, "training processes (required)"),
    ("--max-restarts", "max_restarts", int, 0, "restarts after a failure"),
)
WITH_RAY = (
    ("--gpus-per-rank", "gpus", float, 1.0, "0: train on CPUs"),
    ("--cpus-per-rank", "cpus", float, 1.0, "may be a fraction"),
    ("--servers", "servers", int, None, _SERVERS + "0: the first rank starts one"),
    ("--gpus-per-server", "gpus_per_server", int, None, "default: server_tensor_parallel_size"),
    ("--cpus-per-server", "cpus_per_server", float, 1.0, None),
    ("--wait", "wait_s", float, 300.0, "seconds to wait for free resources (default: 300)"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchArgs:
    """The resources of a run."""

    ray: bool
    share_gpu: bool
    ranks: int
    gpus: float  # of each rank; 0: CPU only
    cpus: float
    servers: int | None  # None: as many as the configuration needs
    gpus_per_server: int | None  # None: as many as it spreads the model over
    cpus_per_server: float
    max_restarts: int
    wait_s: float  # for free resources on the cluster
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
    """Options by the names of the fields of `LaunchArgs`."""
    parser.add_argument("--ray", action="store_true", help="use a Ray cluster (default: torchrun, here)")
    meaning = "all ranks use the first GPU, for tests and development (also: WHETSTONE_SHARE_GPU=1)"
    parser.add_argument("--share-gpu", action="store_true", help=meaning)
    for group, options in ((parser, OPTIONS), (parser.add_argument_group("with --ray"), WITH_RAY)):
        for option, field, kind, default, meaning in options:
            group.add_argument(
                option, dest=field, type=number(kind), default=default, metavar="N", help=meaning
            )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="train [CONFIG] [key=value ...]")


def launch_args(args: argparse.Namespace) -> LaunchArgs:
    """The parsed command line as `LaunchArgs`; `UserError` for what is missing."""
    if args.command[:1] != ["train"]:
        raise UserError(f"Say what to launch: write {USAGE}.")
    if args.ranks < 1:
        raise UserError(f"Say on how many ranks to train: write {USAGE}.")
    others = [option for option, field, _, default, _ in WITH_RAY if getattr(args, field) != default]
    if others and not args.ray:
        raise UserError(f"{others[0]} is for a Ray cluster: add --ray, or leave it out.")
    args.share_gpu |= shares_gpu()
    if args.share_gpu and args.ray:
        raise UserError(
            "Ray gives each rank its own GPU: leave out --share-gpu (unset WHETSTONE_SHARE_GPU), or --ray."
        )
    options = {name: value for name, value in vars(args).items() if name != "command"}
    return LaunchArgs(**options, train_args=args.command[1:])


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
    spread, gpus = engines.server_tensor_parallel_size, args.gpus_per_server
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
