"""One decode step on a CPU: the newest tokens of the slots -> logits.

`CpuLayerStep` runs the layers of decoder_layers.py with few plain operators, since on a small model the calls
take most of the time. Products have the weights on the left: 1.1 to 1.6 times faster in BLAS for a few dozen
rows (docs/log.md). `CpuModuleStep` runs the transformers modules: for other architectures, LoRA and tensor
parallel ranks. `make_cpu_step` compares the two on real tokens first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from whetstone.engines.native import decoder_layers
from whetstone.engines.native.cpu_cache import DecodeAttention
from whetstone.engines.native.decoder_layers import Decoder, DecoderLayer, UnsupportedArchitecture
from whetstone.model.adapters import selection_of
from whetstone.model.policy import Policy


class CpuModuleStep:
    def __init__(self, policy: Policy):
        self.policy = policy

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> Tensor:
        """Tokens [n] at positions [n] -> logits [n, V]; keys and values go into the slots."""
        hidden = self.policy.hidden(token_ids[:, None], positions[:, None], attend)
        return self.policy.head(hidden[:, 0])

    def is_current(self) -> bool:
        """Whether it still reads the policy's weights."""
        return True


class CpuLayerStep:
    def __init__(self, policy: Policy, decoder: Decoder):
        self.policy, self.decoder = policy, decoder
        self.embedding = policy.lm.get_input_embeddings()
        self.eps, self.offset = decoder.norm_kind
        self.head = policy.lm.get_output_embeddings()
        names = ("final_logit_softcapping", "logits_scaling")  # what else policy.head does
        self.is_plain_head = self.head.bias is None and not any(hasattr(policy.config, n) for n in names)
        self.rotary: dict[int, tuple[Tensor, Tensor]] = {}  # such that x cos + roll(x, half) sin is x rotated
        for layer in decoder.layers:
            assert layer.attention.rotary is not None
            cosines, sines = layer.attention.rotary  # [positions, head_dim / 2]
            table = (torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1))
            self.rotary[id(layer.attention.rotary)] = table

    def is_current(self) -> bool:
        return all(fused.is_current() for fused in self.decoder.linears())

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> Tensor:
        rotations = {
            key: (cosines[positions][:, None], sines[positions][:, None])
            for key, (cosines, sines) in self.rotary.items()
        }
        residual = self.embedding(token_ids)
        for layer in self.decoder.layers:
            hidden = self._norm(residual, layer.input_norm)
            out = self._attention(layer, hidden, rotations[id(layer.attention.rotary)], attend)
            out = linear(out, layer.out.weight, layer.out.bias)
            residual = residual + self._norm(out, layer.after_attention)
            hidden = self._norm(residual, layer.before_mlp)
            gate, up = linear(hidden, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=1)
            gate = F.gelu(gate, approximate="tanh") if layer.gelu else F.silu(gate)
            out = linear(gate * up, layer.down.weight, layer.down.bias)
            residual = residual + self._norm(out, layer.after_mlp)
        hidden = self._norm(residual, self.decoder.final_norm)
        return linear(hidden, self.head.weight, None) if self.is_plain_head else self.policy.head(hidden)

    def _attention(
        self, layer: DecoderLayer, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: DecodeAttention
    ) -> Tensor:
        attention, n = layer.attention, len(hidden)
        qkv = linear(hidden, layer.qkv.weight, layer.qkv.bias).contiguous()  # or SDPA is slow
        qkv = qkv.view(n, attention.heads + 2 * attention.kv_heads, attention.head_dim)
        rotated = qkv[:, : attention.heads + attention.kv_heads]
        if attention.head_norms is not None:
            heads = rotated.split([attention.heads, attention.kv_heads], dim=1)
            normed = [self._norm(x, w) for x, w in zip(heads, attention.head_norms, strict=True)]
            rotated = torch.cat(normed, 1)
        cosines, sines = rotation
        rotated = torch.addcmul(rotated * cosines, rotated.roll(attention.head_dim // 2, -1), sines)
        rotated = rotated.to(qkv.dtype)  # some tables are float32 whatever the model is
        query, key = rotated.split([attention.heads, attention.kv_heads], dim=1)
        value = qkv[:, attention.heads + attention.kv_heads :]
        out = attend(query[:, :, None], key[:, :, None], value[:, :, None], attention.options)
        return out.reshape(n, attention.heads * attention.head_dim)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm; `x` itself where there is none."""
        if weight is None:
            return x
        return F.rms_norm(x, weight.shape, weight + self.offset if self.offset else weight, self.eps)


CpuStep = CpuModuleStep | CpuLayerStep


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of few rows."""
    out = torch.mm(weight, x.t()).t()
    return out if bias is None else out + bias


def make_cpu_step(policy: Policy, token_ids: Tensor, positions: Tensor, attend: DecodeAttention) -> CpuStep:
    """`CpuLayerStep` if its logits on these tokens equal those of the modules, else the modules."""
    modules = CpuModuleStep(policy)
    is_adapted = policy.is_lora or selection_of(policy.model) is not None
    if policy.sharding is not None or is_adapted or policy.device.type != "cpu":
        return modules
    try:
        with torch.inference_mode(False):  # parameters are moved, and must still be able to train
            fused = CpuLayerStep(policy, decoder_layers.read_decoder_layers(policy))
        expected, actual = modules(token_ids, positions, attend), fused(token_ids, positions, attend)
        decoder_layers.check_step(policy, actual, expected)
    except UnsupportedArchitecture as reason:
        decoder_layers.log_fallback(policy, reason)
        return modules
    return fused
