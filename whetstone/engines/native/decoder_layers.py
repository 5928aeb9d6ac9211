"""A transformers model, read as a list of blocks that the fused decoder can run; or the reason why it can't.

Reads the modules by their names and asks the model itself for the rest: a short forward pass tells each
layer's scale, window and softcap, and its own rotary embedding makes the tables. Whatever is built here is
compared with the model's own forward pass before it is used (fused.py), so a misreading can't pass.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whetstone.engines.native.fused_linear import Joined, is_plain
from whetstone.engines.native.slot_state import AttentionLayer
from whetstone.model.attention import LayerOptions, PackedAttention, packed_segments
from whetstone.model.policy import Policy

LONGEST_TABLE = 1 << 18  # positions of a rotary table


Tables = dict[tuple[str, ...], tuple[Tensor, Tensor]]  # by kind of layer: cosines and sines


class Unreadable(Exception):
    """Why a model can't be read as blocks."""


@dataclass(frozen=True, kw_only=True)
class Block:
    attention: AttentionLayer
    qkv: Joined
    out: Joined
    gate_up: Joined
    down: Joined
    gelu: bool
    input_norm: Tensor
    after_attention: Tensor | None  # a norm of the attention's output, before it is added (Gemma)
    before_mlp: Tensor
    after_mlp: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    layers: list[Block]
    final_norm: Tensor
    norm_kind: tuple[float, float]  # eps, and 1 where weights are stored as their difference from 1

    def joined(self) -> list[Joined]:
        return [part for block in self.layers for part in (block.qkv, block.out, block.gate_up, block.down)]


def read_blocks(policy: Policy, *, merge: bool = True) -> Blocks:
    """Raises Unreadable. `merge`: LoRA adapters are merged into copies of their matrices."""
    options = _layer_options(policy)
    trunk, config = policy.trunk, policy.config
    try:
        norm_kind = _norm_kind(trunk.norm)
        tables: Tables = {}
        layers = [
            _read_block(policy, module, options[number], norm_kind, tables, merge)
            for number, module in enumerate(trunk.layers)
        ]
        final_norm = trunk.norm.weight.data
    except AttributeError as error:
        raise Unreadable(f"{type(trunk).__name__} is laid out in another way ({error})") from None
    if len(layers) != config.num_hidden_layers:
        raise Unreadable("its number of layers differs from its configuration")
    return Blocks(layers=layers, final_norm=final_norm, norm_kind=norm_kind)


def _read_block(
    policy: Policy,
    module: Any,
    options: LayerOptions,
    norm_kind: tuple[float, float],
    tables: "Tables",
    merge: bool,
) -> Block:
    attention, mlp, config = module.self_attn, module.mlp, policy.config
    has = {name for name, _ in module.named_modules()}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fused_qkv = "self_attn.qkv_proj" in has
    fused_gate = "mlp.gate_up_proj" in has
    qkv = [attention.qkv_proj] if fused_qkv else [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_up_proj] if fused_gate else [mlp.gate_proj, mlp.up_proj]
    if not all(map(is_plain, (*qkv, attention.o_proj, *gate_up, mlp.down_proj))):
        raise Unreadable("its adapter is more than a LoRA of two matrices")
    head_norms = None
    if "self_attn.q_norm" in has:
        head_norms = (attention.q_norm.weight.data, attention.k_norm.weight.data)
        if head_norms[0].shape != (width,) or _norm_kind(attention.q_norm) != norm_kind:
            raise Unreadable("its norms of queries and keys are of another kind")
    sandwich = "pre_feedforward_layernorm" in has
    activation = config.hidden_activation if hasattr(config, "hidden_activation") else config.hidden_act
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise Unreadable(f"its activation is {activation}")
    return Block(
        attention=AttentionLayer(
            options=options,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=width,
            rotary=_rotary_table(policy, options.layer, width, tables),
            head_norms=head_norms,
            norm_offset=norm_kind[1],
            norm_eps=norm_kind[0],
        ),
        qkv=Joined(qkv, merge=merge),
        out=Joined([attention.o_proj], merge=merge),
        gate_up=Joined(gate_up, merge=merge),
        down=Joined([mlp.down_proj], merge=merge),
        gelu=activation != "silu",
        input_norm=module.input_layernorm.weight.data,
        after_attention=module.post_attention_layernorm.weight.data if sandwich else None,
        before_mlp=(
            module.pre_feedforward_layernorm if sandwich else module.post_attention_layernorm
        ).weight.data,
        after_mlp=module.post_feedforward_layernorm.weight.data if sandwich else None,
    )


class _Listener:
    """Attention that also notes what each layer asks for."""

    def __init__(self, device: torch.device):
        self.packed = PackedAttention(packed_segments([4]), device)
        self.heard: dict[int, LayerOptions] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self.heard[options.layer] = options
        return self.packed(query, key, value, options)


@torch.no_grad()
def _layer_options(policy: Policy) -> dict[int, LayerOptions]:
    listener = _Listener(policy.device)
    positions = torch.arange(4, device=policy.device)[None]
    policy.hidden(positions, positions, listener)
    return listener.heard


@torch.no_grad()
def _norm_kind(norm: Any) -> tuple[float, float]:
    """(eps, offset): tried on random numbers, since class names say nothing certain."""
    weight = norm.weight
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator).to(weight)
    own = norm(x).float()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if torch.allclose(normed * (weight.float() + offset), own, rtol=2e-2, atol=2e-2):
            return float(eps), offset
    raise Unreadable(f"{type(norm).__name__} is no RMS norm")


@torch.no_grad()
def _rotary_table(policy: Policy, layer: int, width: int, tables: "Tables") -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, width / 2] from the model's own rotary embedding; one table per kind of
    layer, which its layers share.
    """
    rotary, config = policy.trunk.rotary_emb, policy.config
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    kind = (config.layer_types[layer],) if by_type else ()
    if kind not in tables:
        length = min(policy.max_length or 4096, LONGEST_TABLE)
        probe = torch.zeros(1, 1, 1, dtype=policy.lm.dtype, device=policy.device)
        positions = torch.arange(length, device=policy.device)[None]
        cosines, sines = rotary(probe, positions, *kind)
        short = rotary(probe, positions[:, :8], *kind)[0]
        half = width // 2
        if cosines.shape[-1] != width or not torch.equal(cosines[..., :half], cosines[..., half:]):
            raise Unreadable("it rotates only a part of each head, or in another order")
        if not torch.equal(short, cosines[:, :8]):
            raise Unreadable("its rotary embedding depends on the length of the sequence")
        tables[kind] = (cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous())
    return tables[kind]
