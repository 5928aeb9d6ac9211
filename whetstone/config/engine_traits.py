"""The rollout engines and their traits; the engines themselves are built in whetstone/engines.

`ENGINE_TRAITS` is the only list of engines. An engine from a user's file samples in the trainer's process.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from whetstone.config.plugins import is_plugin


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    in_process: bool = False  # samples in the trainer's process, from the policy's weights or a copy
    has_servers: bool = False  # samples in rollout servers with weights of their own
    can_colocate: bool = False  # vllm_mode: colocate runs it in the trainer's process
    can_quantize: bool = False  # supports rollout_quantization
    uses_attn_implementation: bool = False  # runs the transformers model with attn_implementation
    # Variants of LoRA that it samples from.
    adapters: tuple[str, ...] = ("use_rslora", "use_dora", "load_in_4bit")
    package: str = "torch"
    comes_with_whetstone: bool = True  # the package is one of whetstone's own requirements
    versions: str = ""  # of the package that are supported, as pip writes them; empty: not bounded here

    @property
    def install(self) -> str | None:
        """The command that installs the package; None: it comes with whetstone."""
        if self.comes_with_whetstone:
            return None
        return "pip install " + (f"'{self.package}{self.versions}'" if self.versions else self.package)


ENGINE_TRAITS: dict[str, EngineTraits] = {
    "native": EngineTraits(in_process=True, can_quantize=True),
    "hf": EngineTraits(in_process=True, uses_attn_implementation=True, package="transformers"),
    "vllm": EngineTraits(
        has_servers=True,
        can_colocate=True,
        adapters=("use_rslora",),
        package="vllm",
        comes_with_whetstone=False,
        versions=">=0.22,<0.33",
    ),
    "sglang": EngineTraits(
        has_servers=True,
        adapters=(),
        package="sglang",
        comes_with_whetstone=False,
        versions=">=0.5.16,<0.5.24",
    ),
}
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINE_TRAITS)]
SERVER_ENGINES = [name for name, traits in ENGINE_TRAITS.items() if traits.has_servers]


def engine_traits(name: str) -> EngineTraits:
    return EngineTraits(in_process=True) if is_plugin(name) else ENGINE_TRAITS[name]
