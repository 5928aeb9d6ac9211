"""flash-linear-attention, whose kernels transformers uses for gated delta layers where it is installed."""

import importlib.util
import sys

REMEDY = "install Triton 3.7.1 or later (torch 2.12.1 brings it), or the package tilelang"


def fla_problem(triton_version: str, capability: tuple[int, int]) -> str | None:
    """Why its backward pass refuses such a GPU with this Triton; None: it does not."""
    number = tuple(int(part) for part in triton_version.split("+")[0].split(".")[:3] if part.isdigit())
    if capability != (9, 0) or not (3, 4) <= number < (3, 7, 1) or importlib.util.find_spec("tilelang"):
        return None
    return f"flash-linear-attention refuses Triton {triton_version} on a Hopper GPU"


def installed_problem() -> str | None:
    """The same for this machine; None: it is not installed, or works."""
    import torch

    if not all(map(importlib.util.find_spec, ("fla", "triton"))) or not torch.cuda.is_available():
        return None
    import triton

    return fla_problem(triton.__version__, torch.cuda.get_device_capability())


def block_fla() -> None:
    """Let transformers take its rule in torch, once and before it imports a model: imports of fla fail."""
    sys.modules["fla"] = None  # type: ignore[assignment]
