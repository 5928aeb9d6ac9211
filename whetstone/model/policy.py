"""The policy: loading, precision, LoRA, and the forward pass on packed sequences.

`Policy.hidden` runs the transformers trunk with our attention, `Policy.head` computes logits. Both are
compared with the model's own forward pass at the start, so an unsupported architecture is refused.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError, message_of
from whetstone.model.attention import (
    NAME,
    AttentionFn,
    LayerOptions,
    PackedAttention,
    index_rows,
    packed_segments,
    uses_flash,
)
from whetstone.model.fused_head import Head
from whetstone.model.hub import base_and_adapter, resolve
from whetstone.model.loading import load_pretrained, verify_folder
from whetstone.model.logprobs import UNSHARDED, LogitsLayout, TokenStatistics, scale_logits, token_statistics
from whetstone.model.modes import Modes, disable_dropout
from whetstone.model.nf4 import quantize_model
from whetstone.model.padded import padded_hidden, rows_hidden
from whetstone.model.sharding import Sharding
from whetstone.model.size import CACHED_KINDS, GENERATE, layers_of, longrope_length, widest_layer
from whetstone.model.tiled_attention import plan_attention
from whetstone.model.verification import (
    perturbed_embeddings,
    relative_error,
    rounding_bound,
    text_tokens,
)
from whetstone.parallel.fsdp import Root
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.types import Segment

logger = logging.getLogger("whetstone")


class Policy:
    """A causal language model with its tokenizer, on one device or (`sharding`) on all ranks."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        root: nn.Module | None = None,
        logits_layout: LogitsLayout = UNSHARDED,
        sharding: Sharding | None = None,
    ):
        self.model = model  # as saved: a transformers model, or peft's wrapper around one
        self.root = root or Root(model)  # every use of the weights goes through it
        self.logits_layout = logits_layout
        self.sharding = sharding  # None: all weights are on this device
        self.tokenizer = tokenizer
        self.device = device
        self.is_lora = hasattr(model, "peft_config")
        self.lm = model.get_base_model() if self.is_lora else model
        self.trunk = getattr(self.lm, self.lm.base_model_prefix, None) or self.lm.model
        self.config = self.lm.config.get_text_config()
        self.original_attention = self.lm.config._attn_implementation
        self.is_packed = True  # False: trained on padded rows by the model's own forward pass
        self.logit_noise = 0.0  # of half precision, measured by `verify`
        self.cache_shapes: set[tuple[int, int]] = set()  # (heads, size) of keys and values, seen by `verify`
        disable_dropout(self.lm)
        self.modes = Modes(model)
        self.restore_attention()

    def copy(self) -> "Policy":
        """A policy with the same weights: those that train are copied, the others shared."""
        shared = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        other = Policy(copy.deepcopy(self.model, shared), self.tokenizer, self.device)
        other.original_attention = self.original_attention
        other.is_packed, other.cache_shapes = self.is_packed, self.cache_shapes
        other.logit_noise = self.logit_noise
        other.restore_attention()
        return other

    def checkpoint_layers(self, number: int) -> None:
        """Activation checkpointing in the first `number` layers."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer, module in enumerate(self.layers):
            module.gradient_checkpointing = layer < number

    @property
    def layers(self) -> Any:
        """The decoder layers, under whichever name."""
        return layers_of(self.trunk)

    def set_attention(self, name: str) -> None:
        self.lm.set_attn_implementation(name)

    def restore_attention(self) -> None:
        """The attention of the update: ours, or the model's own where it can't be packed."""
        self.set_attention(NAME if self.is_packed else self.original_attention)

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the weights."""
        return SINGLE if self.sharding is None else self.sharding.ranks

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.lm.dtype if self.sharding is None else self.sharding.compute

    @property
    def uses_padding(self) -> bool:
        """Whether attention pads sequences to the longest one."""
        return not uses_flash(self.device, self.dtype, self._attention_softcap)

    @property
    def num_cache_heads(self) -> int:
        """Heads of keys and values on this rank."""
        config = widest_layer(self.config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return heads // self.ranks.tp_size

    @property
    def head_dim(self) -> int:
        config = widest_layer(self.config)
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def max_length(self) -> int | None:
        """Of a sequence."""
        return longrope_length(self.config) or getattr(self.config, "max_position_embeddings", None)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer: the generation config's and the tokenizer's."""
        stops = self.lm.generation_config.eos_token_id
        stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
        if self.tokenizer.eos_token_id is not None:
            stops.append(self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(stops))

    def hidden(self, token_ids: Tensor, position_ids: Tensor, attend: AttentionFn) -> Tensor:
        """[B, T] tokens and positions -> [B, T, H] last hidden states. For engines: never compiled."""
        with self.uncompiled():
            return self.root(lambda: self._hidden_of(self.trunk, token_ids, position_ids, attend))

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, this policy's layers run uncompiled; torch's own switch would hold for all threads."""
        compiled = [layer._compiled_call_impl for layer in self.layers]
        for layer in self.layers:
            layer._compiled_call_impl = None
        try:
            yield
        finally:
            for layer, call in zip(self.layers, compiled, strict=True):
                layer._compiled_call_impl = call

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states -> logits of the whole vocabulary, as the model's own forward pass makes them."""
        return self.root(lambda hidden: self.logits_layout.gather(self._logits(hidden)), hidden)

    def completion_hidden(self, batch: Any) -> Tensor:
        """[N, H] hidden states that predict the completion tokens of a packed `update.packing.Batch`."""
        return self.root(lambda: self.completion_hidden_of(self.trunk, batch))

    def completion_hidden_of(self, trunk: nn.Module, batch: Any) -> Tensor:
        """The same with another trunk of this architecture (the critic's), inside a call of its root."""
        if not self.is_packed:
            return padded_hidden(trunk, batch)
        token_ids, position_ids, segments = batch.token_ids, batch.position_ids, batch.segments
        # With sequence parallelism tokens must divide among the ranks: an unused segment fills up.
        extra = 0 if self.sharding is None else -len(token_ids) % self.sharding.token_multiple
        if extra:
            segments = [*segments, Segment(len(token_ids), extra)]
            token_ids = F.pad(token_ids, (0, extra))
            position_ids = torch.cat([position_ids, torch.arange(extra, device=position_ids.device)])
        plan = None
        if not self.uses_padding:
            config = widest_layer(self.config)
            plan = plan_attention(segments, config, self.head_dim, self.device, self.dtype)
        attend = PackedAttention(segments, self.device, plan)
        hidden = self._hidden_of(trunk, token_ids[None], position_ids[None], attend)[0]
        return index_rows(hidden, batch.logit_positions)

    def token_statistics(
        self, hidden: Tensor, batch: Any, temperature: float, **settings: Any
    ) -> TokenStatistics:
        """Of every completion token; `settings`: `reference` and others of logprobs.token_statistics."""
        return self.root(
            lambda hidden: token_statistics(
                self._logits,
                hidden,
                batch.targets,
                temperature=temperature,
                logits_layout=self.logits_layout,
                plain_head=self._plain_head(temperature),
                **settings,
            ),
            hidden,
        )

    def all_logprobs(self, batch: Any, temperature: float) -> Tensor:
        """[N, V] logprobs of every token of the vocabulary (of this rank's slice, where it is split)."""
        return self.root(
            lambda hidden: self.logits_layout.logprobs(scale_logits(self._logits(hidden), temperature)),
            self.completion_hidden(batch),
        )

    def _hidden_of(self, trunk: Any, token_ids: Tensor, position_ids: Tensor, attend: AttentionFn) -> Tensor:
        return trunk(
            input_ids=token_ids, position_ids=position_ids, attend=attend, use_cache=False
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm.get_output_embeddings()(hidden)
        softcap, scaling = self._logit_transform
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits if scaling is None else logits / scaling

    @property
    def _logit_transform(self) -> tuple[float | None, float | None]:
        """Applied to logits after the output matrix: a softcap (Gemma), a divisor (Granite, Cohere)."""
        config = self.config
        scale = getattr(config, "logit_scale", None)
        scaling = getattr(config, "logits_scaling", None) if scale is None else 1 / scale
        return getattr(config, "final_logit_softcapping", None), scaling

    def _plain_head(self, temperature: float) -> Head | None:
        """`_logits` as one matrix, for kernels; None where it is more than that (an adapter, a slice)."""
        head = self.lm.get_output_embeddings()
        if type(head) is not nn.Linear or self.logits_layout is not UNSHARDED:
            return None
        softcap, scaling = self._logit_transform
        return Head(head.weight, head.bias, softcap, 1 / (temperature * (scaling or 1.0)))

    def logprobs(self, batch: Any, temperature: float) -> Tensor:
        """Logprobs [N] of the completion tokens."""
        return self.token_statistics(self.completion_hidden(batch), batch, temperature).logprobs

    @torch.no_grad()
    def verify(self) -> None:
        """Compare our packed forward pass with the model's own on short sequences, once.

        The model's own pass uses sdpa: eager attention in bf16 is off by 0.3 with the large key biases of
        Qwen2.5. Half precision is compared on text alone, since random tokens double the rounding error.
        Where the packed pass differs or fails, the policy is trained on padded rows.
        """
        self.model.eval()
        vocab_size = self.config.vocab_size
        rows = text_tokens(self.tokenizer, vocab_size, self.max_length)
        if self.lm.dtype == torch.float32:  # random tokens, too
            generator = torch.Generator().manual_seed(0)
            rows += [torch.randint(0, vocab_size, (n,), generator=generator) for n in (5, 9, 3)]
        rows = [row.to(self.device) for row in rows]
        # transformers' own attention: eager where sdpa is missing or would leave out the softcap.
        plain = self.lm._supports_sdpa and not self._attention_softcap
        self.set_attention("sdpa" if plain else "eager")
        own = self._own_logits(rows)
        if self.lm.dtype != torch.float32:
            with perturbed_embeddings(self.lm):
                self.logit_noise = relative_error(self._own_logits(rows), own)
        if not own.isfinite().all():
            raise UserError(
                "The model computes numbers that are not finite: its weights are damaged; fetch it again."
            )
        bound, name = rounding_bound(self.lm.dtype, self.logit_noise), type(self.lm).__name__
        self.restore_attention()
        reason = self._packing_problem(rows, own, bound)
        if reason is None:
            return
        self.is_packed = False
        self.restore_attention()
        hidden = [row[: len(ids)] for row, ids in zip(rows_hidden(self.trunk, rows), rows, strict=True)]
        error = relative_error(self.head(torch.cat(hidden)), own)
        if not error < bound:
            raise UserError(
                f"The architecture {name} can't be trained yet: our logits differ from its own by "
                f"{error:.1e}. Choose a Llama, Qwen, Mistral, SmolLM, Gemma or Phi model."
            )
        logger.warning(
            f"{name} can't be packed (our forward pass {reason}): it is trained on padded rows and sampled "
            f"{GENERATE}."
        )

    def _own_logits(self, rows: list[Tensor]) -> Tensor:
        """[T, V] of the model's own forward pass."""
        return torch.cat([self.lm(input_ids=row[None], use_cache=False).logits[0] for row in rows]).float()

    def _packing_problem(self, rows: list[Tensor], own: Tensor, bound: float) -> str | None:
        """What is wrong with the packed pass on `rows`, whose logits are `own`; None: nothing."""
        kinds = set(getattr(self.config, "layer_types", None) or []) - CACHED_KINDS
        if kinds:
            return f"knows nothing of {min(kinds)} layers"
        try:
            packed = self._packed_logits(rows)
            # A convolution that reaches into the sequence before changes few tokens, less than bf16 rounds.
            others = self._packed_logits([(rows[0] + 1) % self.config.vocab_size, *rows[1:]])
        except Exception as failure:  # an architecture that knows nothing of packed sequences
            return f"fails ({message_of(failure)})"
        error = relative_error(packed, own)
        if not error < bound:
            return f"differs by {error:.1e}"
        changed = (others - packed)[len(rows[0]) :].norm(dim=-1) / packed[len(rows[0]) :].norm(dim=-1)
        # Nothing changes in attention and MLPs, to the bit; experts may get other tiles and round otherwise.
        has_experts = any(hasattr(self.config, f"num_{kind}experts") for kind in ("", "local_"))
        return "mixes sequences" if changed.max() > (0.1 if has_experts else 1e-3) else None

    def _packed_logits(self, rows: list[Tensor]) -> Tensor:
        """[T, V] of rows laid end to end; notes the shapes of keys and values."""
        packed = PackedAttention(packed_segments([len(row) for row in rows]), self.device)

        def attend(query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
            self.cache_shapes |= {(tensor.shape[1], tensor.shape[3]) for tensor in (key, value)}
            return packed(query, key, value, options)

        position_ids = torch.cat([torch.arange(len(row), device=self.device) for row in rows])
        return self.head(self.hidden(torch.cat(rows)[None], position_ids[None], attend)[0]).float()

    @property
    def _attention_softcap(self) -> float | None:
        return getattr(self.config, "attn_logit_softcapping", None)


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device is cuda, but torch sees no CUDA GPU: set device=cpu, or install CUDA torch and driver."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_policy(
    config: ModelConfig, weights: str | Path | None = None, device: torch.device | None = None
) -> Policy:
    """The policy of a configuration, whole on one device, with the `weights` (or adapter) of a checkpoint.

    A model that is itself an adapter is trained further under use_peft, otherwise merged into its base.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the run's own line says what it is doing
    drawn = torch.get_rng_state()  # a new adapter is the same however the model came here
    home = choose_device(config.device)
    adapter = weights is not None and (Path(weights) / "adapter_config.json").is_file()
    start = None
    if weights is None or adapter:
        base, start = base_and_adapter(config.model_name_or_path)
    else:
        base = resolve(str(weights))
    for folder in (base, start):
        if folder is not None and folder != str(weights):  # those of a run to resume have been verified
            verify_folder(Path(folder))
    tokenizer, model = load_pretrained(base, compute_dtype(config, home))
    if model._hf_peft_config_loaded:  # transformers has put an adapter of the hub into it by itself
        raise UserError(f"{base} is an adapter: fetch it, and give its folder as model_name_or_path.")
    device = device or home
    if config.load_in_4bit:
        quantize_model(model, device)
    model.to(device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if adapter or config.use_peft or start is not None:
        from whetstone.model.lora import adapted

        torch.set_rng_state(drawn)
        model = adapted(model, config, str(weights) if adapter else None, start)
    enable_checkpointing(model, config)
    policy = Policy(model, tokenizer, device)
    policy.verify()
    return policy


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if config.bf16 and device.type == "cuda" else torch.float32


def enable_checkpointing(model: Any, config: ModelConfig) -> None:
    """All layers, where the configuration says so; `auto` is decided later (update/micro_batch_size)."""
    if config.gradient_checkpointing is True:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
