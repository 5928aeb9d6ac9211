"""The pool on a Ray cluster: one sandbox actor per scoring process, placed by Ray, replaced when it dies.

Each actor has a `LocalPool` and determines the isolation level of its machine. Expected values stay here.
"""

from typing import Any

from whetstone.errors import UserError
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import LOST, Limits, Outcome, Program

_NAMESPACE = "whetstone"


class _SandboxActor:
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

    def __init__(self, *, address: str = "auto", isolation: str = "auto") -> None:
        """`address`: of a running cluster, `auto` to find it, `local` to start one on this machine."""
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError("Ray is not installed: pip install ray, or set sandbox_pool: local.") from None
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
        self._statement: str | None = None
        self._actor_handle: Any = None

    def run(self, program: Program, limits: Limits) -> Outcome:
        patience_s = limits.total_seconds + limits.seconds + limits.compile_seconds + 60
        for _ in range(2):
            try:
                return self._ray.get(self._actor().run.remote(program, limits), timeout=patience_s)
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
                self.close()
        return Outcome(results=(LOST,) * len(program.inputs))

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
        """End the actor, and with it its supervisors. May be called twice."""
        if self._actor_handle is not None:
            self._ray.kill(self._actor_handle)
            self._actor_handle = None

    def _actor(self) -> Any:
        if self._actor_handle is None:
            self._actor_handle = self._ray.remote(num_cpus=1)(_SandboxActor).remote(self._isolation)
        return self._actor_handle
