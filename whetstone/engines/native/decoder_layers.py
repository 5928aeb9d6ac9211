"""Read a transformers model as a list of decoder layers that the fused step can run.

Modules are found by name. A short forward pass records each layer's scale, window and softcap, its queries
and its keys; the model's own rotary embedding makes the tables. Queries and keys must be those that were
recorded, and the logits of the fused step those of the model (decode_step.py), so a misreading is detected.
The logits alone do not tell in half precision: their rounding can hide another order of rotation.
"""

import contextlib
import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whetstone.engines.native.fused_linear import FusedLinear, fuse, is_linear_or_lora
from whetstone.engines.native.slot_state import AttentionLayer
from whetstone.model.attention import LayerOptions, PackedAttention, packed_segments
from whetstone.model.policy import Policy
from whetstone.model.verification import relative_error, rounding_bound

logger = logging.getLogger("whetstone")

MAX_POSITIONS = 1 << 18  # of a rotary table
NO_ROTATION = ("none",)  # kind of a layer without rotary embeddings
PROBE_TOKENS = 16  # half of them close together, the others over all positions
NormKind = tuple[float, float]  # eps, and 1 where weights are stored as their difference from 1
Tables = dict[tuple[str, ...], tuple[Tensor, Tensor]]  # by kind of layer: cosines and sines


class UnsupportedArchitecture(Exception):
    """Why a model cannot be read as decoder layers."""


class MisreadArchitecture(UnsupportedArchitecture):
    """Its layers compute something else than its modules."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    attention: AttentionLayer
    qkv: FusedLinear
    out: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    gelu: bool
    input_norm: Tensor
    after_attention: Tensor | None  # a norm of the attention's output, before it is added (Gemma)
    before_mlp: Tensor
    after_mlp: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Decoder:
    layers: list[DecoderLayer]
    final_norm: Tensor
    norm_kind: NormKind

    def linears(self) -> list[FusedLinear]:
        return [
            linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]


@dataclass(frozen=True, kw_only=True)
class AttentionProbe:
    """What the attention of a layer gets in a short forward pass."""

    options: LayerOptions
    positions: Tensor  # [T]
    query: Tensor  # [heads, T, head_dim], rotated
    key: Tensor  # [kv_heads, T, head_dim]
    hidden: Tensor  # [T, H], the layer's input after its norm


def check_step(policy: Policy, actual: Tensor, expected: Tensor) -> None:
    """Raise unless the logits of the layers equal those of the modules."""
    error = relative_error(actual, expected)
    if not error < rounding_bound(policy.dtype, policy.logit_noise):
        raise MisreadArchitecture(f"its fused step differs from its modules by {error:.1e}")


def log_fallback(policy: Policy, reason: UnsupportedArchitecture) -> None:
    level = logging.WARNING if isinstance(reason, MisreadArchitecture) else logging.INFO
    name = type(policy.lm).__name__
    logger.log(level, f"The native engine runs {name} module by module, which is slower: {reason}.")


def read_decoder_layers(policy: Policy, *, merge: bool = True) -> Decoder:
    """Raises `UnsupportedArchitecture`. `merge`: LoRA adapters are merged into copies of their matrices."""
    trunk, config = policy.trunk, policy.config
    try:
        probes = _probe_attention(policy)
        norm_kind = _norm_kind(trunk.norm)
        tables: Tables = {}
        layers = [
            _read_layer(policy, module, probes[number], norm_kind, tables, merge)
            for number, module in enumerate(trunk.layers)
        ]
        final_norm = trunk.norm.weight.data
    except AttributeError as error:
        raise UnsupportedArchitecture(f"{type(trunk).__name__} has other modules ({error})") from None
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedArchitecture("its number of layers differs from its configuration")
    return Decoder(layers=layers, final_norm=final_norm, norm_kind=norm_kind)


def _read_layer(
    policy: Policy, module: Any, probe: AttentionProbe, norm_kind: NormKind, tables: Tables, merge: bool
) -> DecoderLayer:
    attention, mlp, config, head_dim = module.self_attn, module.mlp, policy.config, policy.head_dim
    submodules = {name for name, _ in module.named_modules()}
    has_qkv, has_gate_up = "self_attn.qkv_proj" in submodules, "mlp.gate_up_proj" in submodules
    qkv = [attention.qkv_proj] if has_qkv else [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_up_proj] if has_gate_up else [mlp.gate_proj, mlp.up_proj]
    if not all(map(is_linear_or_lora, (*qkv, attention.o_proj, *gate_up, mlp.down_proj))):
        raise UnsupportedArchitecture("its adapter is more than a LoRA of two matrices")
    head_norms = None
    if "self_attn.q_norm" in submodules:
        head_norms = (attention.q_norm.weight.data, attention.k_norm.weight.data)
        if head_norms[0].shape != (head_dim,) or _norm_kind(attention.q_norm) != norm_kind:
            raise UnsupportedArchitecture("its norms of queries and keys are of another kind")
    has_post_norms = "pre_feedforward_layernorm" in submodules
    post_attention = module.post_attention_layernorm.weight.data  # without post norms it precedes the MLP
    activation = config.hidden_activation if hasattr(config, "hidden_activation") else config.hidden_act
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedArchitecture(f"its activation is {activation}")
    attention_layer = AttentionLayer(
        options=probe.options,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rotary=_rotary_table(policy, probe.options.layer, head_dim, tables),
        head_norms=head_norms,
        norm_offset=norm_kind[1],
        norm_eps=norm_kind[0],
    )
    fused_qkv = fuse(qkv, merge=merge)
    return DecoderLayer(
        attention=_with_rotation(attention_layer, fused_qkv, probe, tables),
        qkv=fused_qkv,
        out=fuse([attention.o_proj], merge=merge),
        gate_up=fuse(gate_up, merge=merge),
        down=fuse([mlp.down_proj], merge=merge),
        gelu=activation != "silu",
        input_norm=module.input_layernorm.weight.data,
        after_attention=post_attention if has_post_norms else None,
        before_mlp=module.pre_feedforward_layernorm.weight.data if has_post_norms else post_attention,
        after_mlp=module.post_feedforward_layernorm.weight.data if has_post_norms else None,
    )


@torch.no_grad()
def _probe_attention(policy: Policy) -> dict[int, AttentionProbe]:
    """By layer, from a forward pass of the model's own modules."""
    packed = PackedAttention(packed_segments([PROBE_TOKENS]), policy.device)
    probes: dict[int, AttentionProbe] = {}
    normed: list[Tensor] = []  # by the layer that runs

    def attend(query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        if not normed:
            raise UnsupportedArchitecture("its attention does not follow its first norm")
        probes[options.layer] = AttentionProbe(
            options=options, positions=positions[0], query=query[0], key=key[0], hidden=normed.pop()[0]
        )
        return packed(query, key, value, options)

    token_ids = torch.arange(PROBE_TOKENS, device=policy.device)[None]
    far = torch.linspace(PROBE_TOKENS // 2, _num_positions(policy) - 1, PROBE_TOKENS // 2)
    positions = torch.cat([torch.arange(PROBE_TOKENS // 2), far.long()])[None].to(policy.device)
    with contextlib.ExitStack() as hooks:
        for module in policy.trunk.layers:
            hook = module.input_layernorm.register_forward_hook(lambda module, args, out: normed.append(out))
            hooks.callback(hook.remove)
        policy.hidden(token_ids % policy.config.vocab_size, positions, attend)
    return probes


@torch.no_grad()
def _with_rotation(
    layer: AttentionLayer, qkv: FusedLinear, probe: AttentionProbe, tables: Tables
) -> AttentionLayer:
    """The layer with the rotation that gives the recorded queries and keys: its table's, or none (NoPE)."""
    if _is_like(layer, qkv, probe):
        return layer
    assert layer.rotary is not None
    if NO_ROTATION not in tables:
        cosines, sines = layer.rotary
        tables[NO_ROTATION] = (torch.ones_like(cosines), torch.zeros_like(sines))
    unrotated = replace(layer, rotary=tables[NO_ROTATION])
    if not _is_like(unrotated, qkv, probe):
        raise UnsupportedArchitecture("it computes queries and keys in another way")
    return unrotated


def _is_like(layer: AttentionLayer, qkv: FusedLinear, probe: AttentionProbe) -> bool:
    """Whether the layer computes the queries and keys of the model's own."""
    query, key = _queries_and_keys(layer, qkv(probe.hidden), probe.positions)
    bound = rounding_bound(probe.query.dtype, noise=0.0)  # nothing adds up over layers
    return _token_error(query, probe.query) < bound and _token_error(key, probe.key) < bound


def _token_error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error of a token, [heads, T, head_dim]."""
    norms = expected.float().norm(dim=(0, 2)).clamp(min=1e-12)  # the embedding of a padding token is 0
    return ((actual - expected).norm(dim=(0, 2)) / norms).max().item()


def _queries_and_keys(layer: AttentionLayer, qkv: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """[heads, T, head_dim] and [kv_heads, T, head_dim] of the product [T, (heads + 2 kv_heads) head_dim]."""
    assert layer.rotary is not None
    heads = qkv.float().view(len(qkv), -1, layer.head_dim).transpose(0, 1)
    query, key = heads[: layer.heads], heads[layer.heads : layer.heads + layer.kv_heads]
    if layer.head_norms is not None:
        query, key = (
            F.rms_norm(x, weight.shape, weight.float() + layer.norm_offset, layer.norm_eps)
            for x, weight in zip((query, key), layer.head_norms, strict=True)
        )
    cosines, sines = (table[positions].float() for table in layer.rotary)
    low, high = torch.cat([query, key]).chunk(2, dim=-1)
    rotated = torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)
    return rotated.split([layer.heads, layer.kv_heads])


@torch.no_grad()
def _norm_kind(norm: Any) -> NormKind:
    """By a test on random numbers: class names are no proof."""
    weight = norm.weight
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator).to(weight)
    expected = norm(x).float()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if torch.allclose(normed * (weight.float() + offset), expected, rtol=2e-2, atol=2e-2):
            return float(eps), offset
    raise UnsupportedArchitecture(f"{type(norm).__name__} is no RMS norm")


def _num_positions(policy: Policy) -> int:
    return min(policy.max_length or 4096, MAX_POSITIONS)


@torch.no_grad()
def _rotary_table(policy: Policy, layer: int, head_dim: int, tables: Tables) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim / 2] of the model's rotary embedding, one table per kind."""
    rotary, config = policy.trunk.rotary_emb, policy.config
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    kind = (config.layer_types[layer],) if by_type else ()
    if kind not in tables:
        probe = torch.zeros(1, 1, 1, dtype=policy.lm.dtype, device=policy.device)
        positions = torch.arange(_num_positions(policy), device=policy.device)[None]
        cosines, sines = rotary(probe, positions, *kind)
        prefix = rotary(probe, positions[:, :8], *kind)[0]
        half = head_dim // 2
        if cosines.shape[-1] != head_dim or not torch.equal(cosines[..., :half], cosines[..., half:]):
            raise UnsupportedArchitecture("it rotates only a part of each head, or in another order")
        if not torch.equal(prefix, cosines[:, :8]):
            raise UnsupportedArchitecture("its rotary embedding depends on the length of the sequence")
        tables[kind] = (cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous())
    return tables[kind]
