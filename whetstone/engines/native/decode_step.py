"""One decode step of a whole model with as few kernels as it takes: rows of slots -> logits.

`FusedStep` runs the blocks that blocks.py read, seven or eight kernels and products a layer; `ModuleStep`
runs the transformers modules as they are, for models that can't be read so. Both write keys and values into
the pages.
`make_step` chooses, after it compared the two on real tokens.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from whetstone.engines.native.decoder_layers import Block, Blocks, Unreadable, read_blocks
from whetstone.engines.native.fp8 import SIDE, EightBits, can_round
from whetstone.engines.native.fused_linear import adapted_bytes
from whetstone.engines.native.prefill import PagedPrefill
from whetstone.engines.native.slot_state import OWN, PREFIX, TOKEN, AttentionLayer, PagedState
from whetstone.errors import UserError
from whetstone.model.attention import LayerOptions
from whetstone.model.memory import free_memory
from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")


class Step(Protocol):
    def __call__(self, state: PagedState, rows: Tensor) -> Tensor:
        """Feed the newest token of the slots in `rows` (-1: none) and return logits [n, V]."""
        ...

    def prefill(self, sequences: PagedPrefill) -> None:
        """Run whole sequences, for their keys and values in the pages."""
        ...

    def refresh(self) -> None:
        """The policy has new weights."""
        ...

    def is_current(self) -> bool:
        """Whether captured graphs still read the policy's weights."""
        ...


class FusedStep:
    """`eight_bits`: decodes with 8-bit copies of the MLPs' matrices; prompts are run with the matrices."""

    def __init__(self, policy: Policy, blocks: Blocks, *, eight_bits: bool = False):
        self.policy, self.blocks = policy, blocks
        self.rounded = [(EightBits(b.gate_up), EightBits(b.down)) for b in blocks.layers if eight_bits]
        self.embedding = policy.lm.get_input_embeddings()

    def __call__(self, state: PagedState, rows: Tensor) -> Tensor:
        from whetstone.engines.native.kernels.attention import decode_attention
        from whetstone.engines.native.kernels.hopper.linear import linear
        from whetstone.engines.native.kernels.pointwise import add_norm, embed, gated

        kind, eight_bits = self.blocks.norm_kind, bool(self.rounded)
        if _is_plain_table(self.embedding):
            residual = embed(state.fields[TOKEN], rows, self.embedding.weight)
        else:
            residual = self.embedding(state.fields[TOKEN].index_select(0, rows.clamp(min=0).long()))
        x = after = None
        for number, block in enumerate(self.blocks.layers):
            hidden = add_norm(x, residual, block.input_norm, after, kind)
            qkv = linear(hidden, block.qkv)
            layer = block.attention
            sizes = [layer.heads * layer.width, layer.kv_heads * layer.width, layer.kv_heads * layer.width]
            query, key, value = qkv.split(sizes, dim=1)
            x = decode_attention(query, key, value, state, rows, layer)
            x = linear(x, block.out)
            if eight_bits:
                gate_up, down = self.rounded[number]
                norms = (block.before_mlp, block.after_attention)
                hidden = add_norm(x, residual, *norms, kind, eight_bits=True)
                x = down(gated(gate_up(hidden), gelu=block.gelu))
            else:
                x = block.down.in_parts(_half_of_mlp(block, x, residual, kind))
            after = block.after_mlp
        return self.policy.head(add_norm(x, residual, self.blocks.final_norm, after, kind))

    def prefill(self, sequences: PagedPrefill) -> None:
        from whetstone.engines.native.kernels.pointwise import add_norm
        from whetstone.engines.native.kernels.rotary import rotate_and_store

        kind = self.blocks.norm_kind
        residual = self.embedding(sequences.token_ids[0])
        x = after = None
        for block in self.blocks.layers:
            hidden = add_norm(x, residual, block.input_norm, after, kind)
            qkv = block.qkv(hidden)
            layer = block.attention
            where = (sequences.state, sequences.position_ids[0], sequences.places, layer)
            query, key, value = rotate_and_store(qkv, *where)
            if block is self.blocks.layers[-1]:
                return  # its keys and values were all that was wanted of it
            x = sequences.attend(query, key, value, layer.options)
            x = block.out(x)
            x = block.down.in_parts(_half_of_mlp(block, x, residual, kind))
            after = block.after_mlp

    def refresh(self) -> None:
        for joined in self.blocks.joined():
            joined.refresh()
        for gate_up, down in self.rounded:
            gate_up.refresh()
            down.refresh()

    def is_current(self) -> bool:
        return all(joined.is_current() for joined in self.blocks.joined())


def _half_of_mlp(block: Block, x: Tensor, residual: Tensor, kind: tuple[float, float]) -> Tensor:
    """Norm, gates and values, and what becomes of the two."""
    from whetstone.engines.native.kernels.hopper.gated import gated_product
    from whetstone.engines.native.kernels.pointwise import add_norm, gated

    both = gated_product(residual, block.gate_up, gelu=block.gelu)
    norms = (block.before_mlp, block.after_attention)
    hidden = add_norm(x, residual, *norms, kind)
    return gated(block.gate_up(hidden), gelu=block.gelu) if both is None else both(hidden)


class ModuleStep:
    def __init__(self, policy: Policy, heads: tuple[int, int, int]):
        self.policy = policy
        self.heads = heads  # of queries, of keys and values, width
        self.addresses = [parameter.data_ptr() for parameter in policy.model.parameters()]

    def __call__(self, state: PagedState, rows: Tensor) -> Tensor:
        slots = rows.clamp(min=0).long()
        tokens = state.fields[TOKEN].index_select(0, slots).long()
        positions = (state.fields[PREFIX] + state.fields[OWN]).index_select(0, slots).long()
        attend = _PagedAttention(state, rows, self.heads)
        hidden = self.policy.hidden(tokens[:, None], positions[:, None], attend)
        return self.policy.head(hidden[:, 0])

    def prefill(self, sequences: PagedPrefill) -> None:
        self.policy.hidden(sequences.token_ids, sequences.position_ids, sequences)

    def refresh(self) -> None: ...  # these are the policy's own

    def is_current(self) -> bool:
        return self.addresses == [parameter.data_ptr() for parameter in self.policy.model.parameters()]


class _PagedAttention:
    """The attention that a transformers layer calls while it decodes."""

    def __init__(self, state: PagedState, rows: Tensor, heads: tuple[int, int, int]):
        self.state, self.rows, self.heads = state, rows, heads

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        from whetstone.engines.native.kernels.attention import decode_attention

        heads, kv_heads, width = self.heads
        layer = AttentionLayer(options=options, heads=heads, kv_heads=kv_heads, width=width)
        query, key, value = (tensor.squeeze(2).flatten(1) for tensor in (query, key, value))
        out = decode_attention(query, key, value, self.state, self.rows, layer)
        return out.view(len(self.rows), 1, heads, width)


def _is_plain_table(embedding: Any) -> bool:
    """Whether it returns rows of its weight as they are."""
    hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    return type(embedding) is nn.Embedding and embedding.max_norm is None and not hooks


def _may_copy(policy: Policy) -> bool:
    """Whether there is memory for a second copy of the layers with LoRA adapters, adapters merged in: a third
    of what is free, for the update and the cache need room too.
    """
    layers = [module for module in policy.trunk.modules() if hasattr(module, "get_base_layer")]
    return policy.device.type != "cuda" or adapted_bytes(layers) < free_memory(policy.device) / 3


@torch.no_grad()
def make_step(
    policy: Policy, state: PagedState, rehearse: Callable[[Step], Tensor], *, eight_bits: bool = False
) -> Step:
    """The fused step if its logits in a rehearsal are those of the modules, else the modules."""
    config = policy.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, state.shape.num_heads, width)
    try:
        fused = FusedStep(policy, read_blocks(policy, merge=_may_copy(policy) and not eight_bits))
    except Unreadable as reason:
        logger.info(f"The native engine runs {type(policy.lm).__name__} module by module: {reason}.")
        return _unless(eight_bits, ModuleStep(policy, heads), str(reason))
    modules = ModuleStep(policy, heads)  # after read_blocks, which moves parameters
    own, ours = rehearse(modules).float(), rehearse(fused).float()
    error = ((ours - own).norm() / own.norm()).item()
    if error >= (1e-3 if state.dtype == torch.float32 else 5e-2):
        logger.warning(
            f"The native engine's fused step differs from {type(policy.lm).__name__} by {error:.1e}, so its "
            "modules are run one by one: slower, and right."
        )
        return _unless(eight_bits, modules, "its fused step differs from its modules")
    if not eight_bits:
        return fused
    if not all(can_round(joined) for block in fused.blocks.layers for joined in (block.gate_up, block.down)):
        reason = f"its MLPs have biases, or sides that are not multiples of {SIDE}"
        return _unless(True, fused, reason)
    rounded = FusedStep(policy, fused.blocks, eight_bits=True)
    error = ((rehearse(rounded).float() - ours).norm() / ours.norm()).item()
    logger.info(f"Rollouts with 8-bit weights: logits differ by {error:.1%} in a rehearsal.")
    return rounded


def _unless(eight_bits: bool, step: Step, reason: str) -> Step:
    if eight_bits:
        raise UserError(
            f"rollout_quantization=fp8 can't be had with this model, since {reason}: leave it out."
        )
    return step
