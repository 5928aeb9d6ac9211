"""One decode step without a GPU: the newest tokens of the slots -> logits.

`BlockStep` runs the blocks that blocks.py read, with few and plain operators: on a small model calling them
is what takes the time. Products are taken with the weights on the left, which BLAS does 1.1 to 1.6 times as
fast for a few dozen rows (docs/log.md). `ModuleStep` runs the transformers modules as they are: for models
that can't be read, adapters, and ranks that share layers. `choose` compares the two on real tokens first.
"""

import logging
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whetstone.engines.native.cpu_cache import DecodeAttention
from whetstone.engines.native.decoder_layers import Block, Blocks, Unreadable, read_blocks
from whetstone.engines.native.slot_state import AttentionLayer
from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")


class SlotStep(Protocol):
    def __call__(self, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> Tensor:
        """Tokens [n] at positions [n] -> logits [n, V]; keys and values go into the slots."""
        ...

    def is_current(self) -> bool:
        """Whether it still reads the policy's weights."""
        ...


class ModuleStep:
    def __init__(self, policy: Policy):
        self.policy = policy

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> Tensor:
        hidden = self.policy.hidden(token_ids[:, None], positions[:, None], attend)
        return self.policy.head(hidden[:, 0])

    def is_current(self) -> bool:
        return True


class BlockStep:
    def __init__(self, policy: Policy, blocks: Blocks):
        self.policy, self.blocks = policy, blocks
        self.embedding = policy.lm.get_input_embeddings()
        self.eps, self.offset = blocks.norm_kind
        self.head = policy.lm.get_output_embeddings()
        names = ("final_logit_softcapping", "logits_scaling")  # what policy.head does beside the product
        self.is_plain_head = self.head.bias is None and not any(hasattr(policy.config, n) for n in names)
        self.rotary = {id(block.attention.rotary): _whole(block.attention) for block in blocks.layers}

    def is_current(self) -> bool:
        return all(joined.is_current() for joined in self.blocks.joined())

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> Tensor:
        turns = {
            key: (cosines[positions][:, None], sines[positions][:, None])
            for key, (cosines, sines) in self.rotary.items()
        }
        residual = self.embedding(token_ids)
        for block in self.blocks.layers:
            hidden = self._norm(residual, block.input_norm)
            out = self._attention(block, hidden, turns[id(block.attention.rotary)], attend)
            out = product(out, block.out.weight, block.out.bias)
            residual = residual + self._norm(out, block.after_attention)
            hidden = self._norm(residual, block.before_mlp)
            gate, up = product(hidden, block.gate_up.weight, block.gate_up.bias).chunk(2, dim=1)
            gate = F.gelu(gate, approximate="tanh") if block.gelu else F.silu(gate)
            out = product(gate * up, block.down.weight, block.down.bias)
            residual = residual + self._norm(out, block.after_mlp)
        hidden = self._norm(residual, self.blocks.final_norm)
        return product(hidden, self.head.weight, None) if self.is_plain_head else self.policy.head(hidden)

    def _attention(
        self, block: Block, hidden: Tensor, turn: tuple[Tensor, Tensor], attend: DecodeAttention
    ) -> Tensor:
        layer, n = block.attention, len(hidden)
        qkv = product(hidden, block.qkv.weight, block.qkv.bias).contiguous()  # or SDPA takes its slow way
        qkv = qkv.view(n, layer.heads + 2 * layer.kv_heads, layer.width)
        rotated = qkv[:, : layer.heads + layer.kv_heads]
        if layer.head_norms is not None:
            parts = rotated.split([layer.heads, layer.kv_heads], dim=1)
            rotated = torch.cat([self._norm(x, w) for x, w in zip(parts, layer.head_norms, strict=True)], 1)
        cosines, sines = turn
        rotated = torch.addcmul(rotated * cosines, rotated.roll(layer.width // 2, -1), sines)
        query, key = rotated.split([layer.heads, layer.kv_heads], dim=1)
        value = qkv[:, layer.heads + layer.kv_heads :]
        out = attend(query[:, :, None], key[:, :, None], value[:, :, None], layer.options)
        return out.reshape(n, layer.heads * layer.width)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm; `x` itself where there is none."""
        if weight is None:
            return x
        return F.rms_norm(x, weight.shape, weight + self.offset if self.offset else weight, self.eps)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of few rows."""
    out = torch.mm(weight, x.t()).t()
    return out if bias is None else out + bias


def _whole(layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, width] such that x cos + (x rolled by half) sin is x turned."""
    assert layer.rotary is not None
    cosines, sines = layer.rotary
    return torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)


def choose(policy: Policy, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> SlotStep:
    """Blocks, if their logits on these tokens are those of the modules. Both leave the same keys and values
    in the slots.
    """
    modules = ModuleStep(policy)
    if policy.sharding is not None or policy.is_lora or policy.device.type != "cpu":
        return modules
    try:
        with torch.inference_mode(False):  # parameters are moved, and must still be able to train
            blocks = BlockStep(policy, read_blocks(policy))
    except Unreadable as reason:
        logger.info(f"The native engine runs {type(policy.lm).__name__} module by module: {reason}.")
        return modules
    own, ours = modules(token_ids, positions, attend), blocks(token_ids, positions, attend)
    error = ((ours - own).norm() / own.norm()).item()
    if error < 1e-3:
        return blocks
    logger.warning(
        f"The native engine's own step differs from {type(policy.lm).__name__} by {error:.1e}, so its "
        "modules are run one by one: slower, and right."
    )
    return modules
