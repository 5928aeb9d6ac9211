"""vLLM 0.22 to 0.32, as a server or in this process. Only this package knows the differences of versions."""

from whetstone.config.engine_traits import ENGINE_TRAITS
from whetstone.errors import UserError

INSTALL = ENGINE_TRAITS["vllm"].install


def require_vllm(why: str) -> None:
    """`UserError` unless the package is here."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise UserError(
            f"{why} needs the package vllm, which is not installed here: {INSTALL}, or name a server that "
            "runs elsewhere with rollout_servers=http://HOST:PORT."
        )
