"""How the weights of a policy are sharded over the ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whetstone.model.logprobs import UNSHARDED, LogitsLayout
from whetstone.parallel import fsdp, tensor
from whetstone.parallel.mesh import Ranks


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a policy's weights are sharded, and how to shard another model of its architecture."""

    ranks: Ranks
    build_meta: Callable[[], Any]  # the model on the meta device, float32 where it is trained
    compute: torch.dtype
    sequence: bool  # between layers, activations are split along the tokens
    offload: bool  # weights rest in CPU memory

    @property
    def token_multiple(self) -> int:
        return self.ranks.tp_size if self.sequence else 1

    def split(self, model: Any, *, sequence: bool) -> LogitsLayout:
        """Split a language model among tensor-parallel ranks; returns the layout of its logits."""
        if self.ranks.tp_size == 1:
            return UNSHARDED
        lm = model.get_base_model() if hasattr(model, "peft_config") else model
        config = lm.config.get_text_config()
        trunk, head = getattr(lm, lm.base_model_prefix), lm.get_output_embeddings()
        is_tied = head.weight is trunk.embed_tokens.weight
        tensor.parallelize(trunk, config, self.ranks.tp, sequence=sequence)
        tensor.parallelize_head(head, self.ranks.tp)
        if is_tied:
            head.weight = trunk.embed_tokens.weight
        return tensor.ShardedLogits(self.ranks.tp, head.out_features)

    def shard(self, root: nn.Module, trunk: Any) -> None:
        fsdp.shard(root, trunk.layers, self.ranks, compute=self.compute, offload=self.offload)
