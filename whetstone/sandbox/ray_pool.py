"""The same pool on a Ray cluster: a sandbox on each scoring machine, programs sent to whichever is free.

Every actor holds a `LocalPool` of its own and finds out by itself how strongly its machine can isolate. A
program and its inputs travel to the actor, what was printed travels back; expected values stay here. Ray is
imported only when a pool is made. An actor that dies is replaced, as a keeper is.
"""

from typing import Any

from whetstone.errors import UserError
from whetstone.sandbox.pool import LocalPool, lost
from whetstone.sandbox.program import Limits, Outcome, Program

_NAMESPACE = "whetstone"


class _Host:
    """What runs on a machine of the cluster."""

    def __init__(self, isolation: str) -> None:
        self._pool = LocalPool(isolation=isolation)

    def run(self, program: Program, limits: Limits) -> Outcome:
        return self._pool.run(program, limits)

    def start(self, language: str) -> str:
        self._pool.start(language)
        return self._pool.statement


class RayPool:
    """A sandbox somewhere on a Ray cluster, for the process that asks; Ray decides where."""

    def __init__(self, *, address: str = "auto", isolation: str = "auto", num_cpus: float = 1.0) -> None:
        """`address`: of a running cluster, `auto` to find it, `local` to start one on this machine."""
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError(
                "sandbox_pool: ray needs Ray: pip install ray, or set sandbox_pool: local."
            ) from None
        self._ray = ray
        if not ray.is_initialized():
            try:
                ray.init(
                    address=None if address == "local" else address,
                    namespace=_NAMESPACE,
                    log_to_driver=False,
                    include_dashboard=False if address == "local" else None,
                )
            except ConnectionError:
                raise UserError(
                    f"There is no Ray cluster at '{address}': start one with `ray start --head`, give its "
                    "address as ray_address, or set ray_address: local or sandbox_pool: local."
                ) from None
        self._isolation = isolation
        self._num_cpus = num_cpus
        self._statement: str | None = None
        self._host: Any = None

    def run(self, program: Program, limits: Limits) -> Outcome:
        patience_s = limits.total_seconds + limits.seconds + limits.compile_seconds + 60
        for _ in range(2):
            try:
                return self._ray.get(self._actor().run.remote(program, limits), timeout=patience_s)
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
                self.close()
        return Outcome(results=(lost(),) * len(program.inputs))

    def start(self, language: str) -> None:
        try:
            self._statement = self._ray.get(self._actor().start.remote(language))
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(f"A machine of the Ray cluster refuses: {error.cause}") from None
            raise

    @property
    def statement(self) -> str:
        assert self._statement is not None, "start a language first"
        return f"On the Ray cluster: {self._statement}"

    def close(self) -> None:
        """End the actor, and with it its keepers. May be called twice."""
        if self._host is not None:
            self._ray.kill(self._host)
            self._host = None

    def _actor(self) -> Any:
        if self._host is None:
            remote = self._ray.remote(num_cpus=self._num_cpus)(_Host)
            self._host = remote.remote(self._isolation)
        return self._host
