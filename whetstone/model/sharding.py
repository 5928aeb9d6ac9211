"""How the weights of a policy are sharded over the ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whetstone.model.logprobs import WHOLE, Vocabulary
from whetstone.parallel import fsdp, tensor
from whetstone.parallel.mesh import Ranks


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a policy's weights lie on the ranks, and how to lay out another model of its kind."""

    ranks: Ranks
    blank: Callable[[], Any]  # the same model without weights, float32 where it trains
    compute: torch.dtype
    sequence: bool  # between layers, activations are split along the tokens
    offload: bool  # weights rest in the memory of the CPU

    @property
    def token_multiple(self) -> int:
        return self.ranks.tp_size if self.sequence else 1

    def split(self, model: Any, *, sequence: bool) -> Vocabulary:
        """Split a whole language model among tensor-parallel ranks; returns how its logits are to be read."""
        if self.ranks.tp_size == 1:
            return WHOLE
        lm = model.get_base_model() if hasattr(model, "peft_config") else model
        config = lm.config.get_text_config()
        trunk, head = getattr(lm, lm.base_model_prefix), lm.get_output_embeddings()
        is_tied = head.weight is trunk.embed_tokens.weight
        tensor.parallelise(trunk, config, self.ranks.tp, sequence=sequence)
        tensor.parallelise_head(head, self.ranks.tp)
        if is_tied:
            head.weight = trunk.embed_tokens.weight
        return tensor.SlicedVocabulary(self.ranks.tp, head.out_features)

    def shard(self, root: nn.Module, trunk: Any) -> None:
        fsdp.shard(root, trunk.layers, self.ranks, compute=self.compute, offload=self.offload)
