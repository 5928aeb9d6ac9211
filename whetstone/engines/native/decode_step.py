"""One decode step on a GPU: rows of slots -> logits, by fused layers (decoder_layers.py) or the modules."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.engines.native import decoder_layers
from whetstone.engines.native.decoder_layers import Decoder, DecoderLayer, UnsupportedArchitecture
from whetstone.engines.native.fp8 import ALIGNMENT, Fp8Linear, supports_fp8
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.prefill import PagedPrefill
from whetstone.engines.native.slot_state import NUM_CACHED, PROMPT_LEN, TOKEN, AttentionLayer, PagedState
from whetstone.errors import UserError
from whetstone.model.adapters import AdapterSelection, selection_of
from whetstone.model.attention import LayerOptions
from whetstone.model.memory import free_memory
from whetstone.model.nf4 import Nf4Linear
from whetstone.model.policy import Policy
from whetstone.model.verification import relative_error

logger = logging.getLogger("whetstone")


class FusedStep:
    """`fp8`: decode with 8-bit copies of the MLP weights; prefill uses the weights themselves."""

    def __init__(self, policy: Policy, decoder: Decoder, *, fp8: bool = False):
        self.policy, self.decoder, self.adapters = policy, decoder, selection_of(policy.model)
        self.fp8_linears = [(Fp8Linear(b.gate_up), Fp8Linear(b.down)) for b in decoder.layers if fp8]
        self.embedding = policy.lm.get_input_embeddings()

    def __call__(self, state: PagedState, rows: Tensor) -> Tensor:
        """Feed the newest token of the slots in `rows` (-1: none) and return logits [n, V]."""
        with _selecting(self.adapters, state, rows):
            return self._logits(state, rows)

    def _logits(self, state: PagedState, rows: Tensor) -> Tensor:
        from whetstone.engines.native.kernels.attention import decode_attention
        from whetstone.engines.native.kernels.pointwise import add_norm, embed, gated

        kind = self.decoder.norm_kind
        if _is_plain_embedding(self.embedding):
            residual = embed(state.slots[TOKEN], rows, self.embedding.weight)
        else:
            residual = self.embedding(state.slots[TOKEN].index_select(0, rows.clamp(min=0).long()))
        x = post_norm = None
        for number, layer in enumerate(self.decoder.layers):
            hidden = add_norm(x, residual, layer.input_norm, post_norm, kind)
            qkv = _linear(hidden, layer.qkv)
            attention = layer.attention
            q_size, kv_size = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
            x = decode_attention(*qkv.split([q_size, kv_size, kv_size], 1), state, rows, attention)
            x = _linear(x, layer.out)
            if self.fp8_linears:
                gate_up, down = self.fp8_linears[number]
                hidden = add_norm(x, residual, layer.before_mlp, layer.after_attention, kind, fp8=True)
                x = down(gated(gate_up(hidden), gelu=layer.gelu))
            else:
                x = layer.down.split_k(_gate_up(layer, x, residual, kind))
            post_norm = layer.after_mlp
        return self.policy.head(add_norm(x, residual, self.decoder.final_norm, post_norm, kind))

    def prefill(self, sequences: PagedPrefill) -> None:
        """Run whole sequences, for their keys and values in the pages."""
        with sequences.selecting(self.adapters):
            self._prefill(sequences)
        sequences.finish()

    def _prefill(self, sequences: PagedPrefill) -> None:
        from whetstone.engines.native.kernels.pointwise import add_norm
        from whetstone.engines.native.kernels.rotary import rotate_and_store

        kind = self.decoder.norm_kind
        residual = self.embedding(sequences.token_ids[0])
        x = post_norm = None
        for layer in self.decoder.layers:
            qkv = layer.qkv(add_norm(x, residual, layer.input_norm, post_norm, kind))
            positions = sequences.position_ids[0]
            rotated = rotate_and_store(qkv, sequences.state, positions, sequences.cells, layer.attention)
            if layer is self.decoder.layers[-1]:
                return  # only its keys and values are needed
            x = layer.out(sequences.attend(*rotated, layer.attention.options))
            x = layer.down.split_k(_gate_up(layer, x, residual, kind))
            post_norm = layer.after_mlp

    def refresh(self) -> None:
        """The policy has new weights."""
        for linear in self.decoder.linears():
            linear.refresh()
        for gate_up, down in self.fp8_linears:
            gate_up.refresh()
            down.refresh()

    def is_current(self) -> bool:
        """Whether captured graphs still read the policy's weights."""
        return all(linear.is_current() for linear in self.decoder.linears())


def _linear(x: Tensor, fused: FusedLinear) -> Tensor:
    from whetstone.engines.native.kernels import hopper

    out = None if hopper is None else hopper.try_linear(x, fused)
    return fused(x) if out is None else out


def _gate_up(layer: DecoderLayer, x: Tensor, residual: Tensor, kind: tuple[float, float]) -> Tensor:
    """Norm, gate and up projection, and the activation."""
    from whetstone.engines.native.kernels import hopper
    from whetstone.engines.native.kernels.pointwise import add_norm, gated

    gate_up = None if hopper is None else hopper.try_gate_up(residual, layer.gate_up, gelu=layer.gelu)
    hidden = add_norm(x, residual, layer.before_mlp, layer.after_attention, kind)
    return gated(layer.gate_up(hidden), gelu=layer.gelu) if gate_up is None else gate_up(hidden)


class ModuleStep:
    def __init__(self, policy: Policy):
        experts = getattr(policy.lm.config, "_experts_implementation", None)
        if experts == "grouped_mm" and policy.dtype == torch.float32:
            raise UserError(
                "Experts in float32 can't be captured in CUDA graphs: set bf16=true, or rollout_engine=hf."
            )
        self.policy, self.adapters = policy, selection_of(policy.model)
        self.addresses = self._addresses()

    def __call__(self, state: PagedState, rows: Tensor) -> Tensor:
        from whetstone.engines.native.kernels.attention import decode_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
            heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
            layer = AttentionLayer(options=options, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
            query, key, value = (tensor.squeeze(2).flatten(1) for tensor in (query, key, value))
            return decode_attention(query, key, value, state, rows, layer).view(len(rows), 1, heads, head_dim)

        slots = rows.clamp(min=0).long()
        tokens = state.slots[TOKEN].index_select(0, slots).long()
        positions = (state.slots[PROMPT_LEN] + state.slots[NUM_CACHED]).index_select(0, slots).long()
        with _selecting(self.adapters, state, rows[:, None]):
            hidden = self.policy.hidden(tokens[:, None], positions[:, None], attend)
        return self.policy.head(hidden[:, 0])

    def prefill(self, sequences: PagedPrefill) -> None:
        with sequences.selecting(self.adapters):
            self.policy.hidden(sequences.token_ids, sequences.position_ids, sequences)
        sequences.finish()

    def refresh(self) -> None: ...  # it reads the policy's own weights

    def is_current(self) -> bool:
        return self.addresses == self._addresses()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.policy.model.parameters()]


Step = FusedStep | ModuleStep


def _selecting(
    adapters: AdapterSelection | None, state: PagedState, rows: Tensor
) -> AbstractContextManager[None]:
    """Inside, the layers apply the adapters of the slots in `rows`."""
    return nullcontext() if adapters is None else adapters.rows(state.adapters[rows.clamp(min=0).long()])


def _is_plain_embedding(embedding: Any) -> bool:
    """Whether it returns rows of its weight unchanged."""
    hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    return type(embedding) is nn.Embedding and embedding.max_norm is None and not hooks


def _fits_lora_copy(policy: Policy) -> bool:
    """Whether merged copies of the LoRA layers leave two thirds of the memory to the update and the cache."""
    adapted: list[Any] = [module for module in policy.trunk.modules() if hasattr(module, "get_base_layer")]
    bases = [layer.get_base_layer() for layer in adapted]
    copies = sum(base.weight.nbytes for base in bases if not isinstance(base, Nf4Linear))
    return policy.device.type != "cuda" or copies < free_memory(policy.device) / 3


@torch.no_grad()
def make_step(policy: Policy, dry_run: Callable[[Step], Tensor], *, fp8: bool = False) -> Step:
    """The fused step if its logits in a dry run equal those of the modules, else the modules."""
    try:
        merge = _fits_lora_copy(policy) and not fp8
        fused = FusedStep(policy, decoder_layers.read_decoder_layers(policy, merge=merge))
        expected = dry_run(ModuleStep(policy)).float()
        actual = dry_run(fused).float()
        decoder_layers.check_step(policy, actual, expected)
        mlps = [linear for layer in fused.decoder.layers for linear in (layer.gate_up, layer.down)]
        if fp8 and not all(map(supports_fp8, mlps)):
            raise UnsupportedArchitecture(f"its MLPs have biases, or sides not divisible by {ALIGNMENT}")
    except UnsupportedArchitecture as reason:
        if fp8:
            raise UserError(
                f"rollout_quantization=fp8 is not supported for this model, since {reason}: leave it out."
            ) from None
        decoder_layers.log_fallback(policy, reason)
        return ModuleStep(policy)
    if not fp8:
        return fused
    quantized = FusedStep(policy, fused.decoder, fp8=True)
    error = relative_error(dry_run(quantized), actual)
    logger.info(f"Rollouts with 8-bit weights: logits differ by {error:.1%} in a dry run.")
    return quantized
