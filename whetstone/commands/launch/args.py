"""The command line of `whet launch`, and what it means for a configuration: how many ranks and servers, with
how many GPUs and CPUs each. Knows nothing of Ray.
"""

from dataclasses import dataclass, replace
from typing import Any

from whetstone.config import Config, load
from whetstone.config.engine_traits import engine_traits
from whetstone.engines import check_shared_servers
from whetstone.errors import UserError

USAGE = "`whet launch --ray --ranks 16 train CONFIG key=value ...`"
FLAGS = {
    "--ranks": int,
    "--gpus-per-rank": float,
    "--cpus-per-rank": float,
    "--servers": int,
    "--gpus-per-server": int,
    "--cpus-per-server": float,
    "--max-restarts": int,
    "--wait": float,
}
PLACING_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What `whet launch --ray` was asked for."""

    ranks: int
    gpus: float = 1.0  # of each rank; 0: CPU only
    cpus: float = 1.0
    servers: int | None = None  # None: as many as the configuration needs
    gpus_per_server: int | None = None  # None: as many as it spreads the model over
    cpus_per_server: float = 1.0
    max_restarts: int = 0
    wait_s: float = PLACING_S  # for room on the cluster
    words: list[str]  # what follows `whet train`

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


def parse(words: list[str]) -> Launch:
    """The command line after `whet launch`."""
    if not words or words[0] != "--ray":
        raise UserError(
            f"Only Ray is launched by whet itself: write {USAGE}, or use torchrun (docs/scale.md)."
        )
    given: dict[str, Any] = {}
    words = words[1:]
    while words and words[0].startswith("--"):
        flag, equals, value = words.pop(0).partition("=")
        if flag not in FLAGS:
            raise UserError(
                f"'{flag}' is not known to whet launch: it has {', '.join(FLAGS)}, as in {USAGE}."
            )
        if not equals:
            value = words.pop(0) if words else ""
        given[flag] = _number(flag, value)
    if not words or words[0] != "train":
        raise UserError(f"What shall be launched? Write {USAGE}.")
    if given.get("--ranks", 0) < 1:
        raise UserError(f"Say on how many ranks: {USAGE}.")
    names = {"--gpus-per-rank": "gpus", "--cpus-per-rank": "cpus", "--wait": "wait_s"}
    fields = {names.get(flag, flag[2:].replace("-", "_")): value for flag, value in given.items()}
    return Launch(words=words[1:], **fields)


def _number(flag: str, text: str) -> float:
    kind = FLAGS[flag]
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        whole = "a whole number" if kind is int else "a number"
        raise UserError(f"{flag} needs {whole}, 0 or above, as in {USAGE}.")
    return value


def read_config(words: list[str]) -> Config:
    """What the ranks will read from the same words."""
    from whetstone.commands.arguments import DEFAULT_RECIPE, split_words

    source, overrides = split_words(words)
    return load(source or DEFAULT_RECIPE, overrides).config


def settle_servers(asked: Launch, config: Config) -> Launch:
    """The same with the number of servers and of their GPUs known; `UserError` where they don't go with the
    configuration.
    """
    engine, engines = config.rollout.rollout_engine, config.engines
    has_servers = engine_traits(engine).has_servers
    if not has_servers or config.rollout.vllm_mode == "colocate":
        if asked.servers:
            sampler = f"{engine} in the ranks' own processes" if has_servers else engine
            raise UserError(
                f"--servers {asked.servers} places rollout servers, but {sampler} samples here, which needs "
                "none: add rollout_engine=vllm vllm_mode=server after `train`, or leave --servers out."
            )
        return replace(asked, servers=0)
    if engines.addresses:
        if asked.servers:
            raise UserError(
                f"--servers {asked.servers} starts rollout servers, but the configuration names running ones "
                f"({engines.addresses[0]}): leave out one of the two."
            )
        return replace(asked, servers=0)
    if asked.servers == 0:  # the first rank starts its own beside it
        return asked
    if engines.server_devices:
        raise UserError(
            "server_devices names GPUs, but here Ray chooses them: leave it out, and say how many servers "
            f"there shall be with --servers {len(engines.server_devices)}."
        )
    spread = engines.vllm_tensor_parallel_size
    gpus = asked.gpus_per_server
    if gpus is None:
        gpus = spread if asked.gpus else 0
    if gpus not in (0, spread):
        raise UserError(
            f"--gpus-per-server is {gpus}, but vllm_tensor_parallel_size spreads the model over {spread}: "
            f"give vllm_tensor_parallel_size={gpus}, or leave --gpus-per-server out."
        )
    if asked.ranks > 1:
        check_shared_servers(config)
    return replace(asked, servers=asked.servers or 1, gpus_per_server=gpus)
