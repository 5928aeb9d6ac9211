"""Weights for an engine with weights of its own: named tensors in buckets, or a folder that it reads.

A LoRA run sends only its adapter: it is small, and the engine computes base and adapter as the trainer does,
without the rounding of a merge.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from whetstone.model.policy import Policy
from whetstone.model.sharded import checkpoint_tensors

BUCKET_BYTES = 512 * 1024**2


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """One version of the weights on its way: the server reports `version`."""

    version: str
    policy: Policy
    folder: Path | None  # where they lie as files; None: no server of ours reads files


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as in a checkpoint: experts one by one. And a tied head, of which vLLM may hold a copy."""
    from transformers.core_model_loading import revert_weight_conversion

    assert not policy.is_lora, "a LoRA run sends its adapter as a folder"
    weights = {name: tensor.detach() for name, tensor in checkpoint_tensors(policy.lm)}
    head = policy.lm.get_output_embeddings()
    if head is not None:
        weights.setdefault("lm_head.weight", head.weight.detach())
    yield from revert_weight_conversion(policy.lm, weights).items()


def buckets(tensors: Iterator[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors, together at most `size` bytes (or one that is larger)."""
    bucket: list[tuple[str, Tensor]] = []
    used = 0
    for name, tensor in tensors:
        if bucket and used + tensor.nbytes > size:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    if bucket:
        yield bucket


def describe(bucket: list[tuple[str, Tensor]]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, dtypes and shapes, as servers expect them."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
    return [name for name, _ in bucket], dtypes, [list(tensor.shape) for _, tensor in bucket]


class WeightFolders:
    """A folder for each version of the weights; only the newest is kept."""

    def __init__(self, parent: str | None):
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix="whetstone-weights-", dir=parent)).resolve()

    def write(self, policy: Policy, name: str) -> Path:
        """Write a version; it appears under its name once it is whole."""
        folder, partial = self.root / name, self.root / f"{name}.part"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if policy.is_lora:
            policy.model.save_pretrained(partial)
        else:
            # safetensors wants tensors that share no memory.
            weights = {name: w.to("cpu", copy=True).contiguous() for name, w in named_weights(policy)}
            save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
            policy.lm.config.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        return folder

    def keep_only(self, folder: Path) -> None:
        for other in self.root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
