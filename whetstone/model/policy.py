"""The model that is trained: loading, precision, LoRA, and one way to run it on packed sequences.

`Policy.hidden` runs the transformers trunk with our attention, `Policy.head` gives logits. At the start both
are compared with the model's own forward pass: an architecture that our attention cannot serve is refused,
never trained wrongly. Sampling is the engines' business, losses and optimisers the update's.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model.attention import NAME, Attend, PackedAttention, end_to_end, take, takes_flash
from whetstone.model.fused_head import Head
from whetstone.model.hub import foundation, resolve
from whetstone.model.loading import load_pretrained, verify_folder
from whetstone.model.logprobs import WHOLE, TokenStatistics, Vocabulary, all_logprobs, token_statistics
from whetstone.model.sharding import Sharding
from whetstone.parallel.fsdp import Root, plain_to_compiler
from whetstone.parallel.mesh import ALONE, Ranks
from whetstone.types import Segment

COMPILED_FROM = 50_000_000  # parameters


class Policy:
    """A causal language model with its tokenizer, on one device or (`spread`) on those of all ranks."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        root: nn.Module | None = None,
        vocabulary: Vocabulary = WHOLE,
        spread: Sharding | None = None,
    ):
        self.model = model  # as saved: a transformers model, or peft's wrapper around one
        self.root = root or Root(model)  # every use of the weights goes through it
        self.vocabulary = vocabulary
        self.spread = spread  # None: all weights are here
        self.tokenizer = tokenizer
        self.device = device
        self.is_lora = hasattr(model, "peft_config")
        self.lm = model.get_base_model() if self.is_lora else model
        self.trunk = getattr(self.lm, self.lm.base_model_prefix)
        self.config = self.lm.config.get_text_config()
        self.own_attention = self.lm.config._attn_implementation
        self.set_attention(NAME)

    def copy(self) -> "Policy":
        """Another policy with the same weights: copies of those that train, the others shared (LoRA: the
        adapter is copied, the model is not).
        """
        shared = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        other = Policy(copy.deepcopy(self.model, shared), self.tokenizer, self.device)
        other.own_attention = self.own_attention
        return other

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile every layer, once for all: they differ in their weights only, and lengths may vary.

        The whole model at once takes minutes. What happens between the layers is little. Where FSDP shards
        them, it gathers and frees their weights outside of what is compiled.
        """
        for layer in self.trunk.layers:
            plain_to_compiler(layer)
            layer.compile(dynamic=True, backend=backend)

    def run_layers_again(self, number: int) -> None:
        """Let the first `number` layers forget their activations and run again in the backward pass."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer, module in enumerate(self.trunk.layers):
            module.gradient_checkpointing = layer < number

    def set_attention(self, name: str) -> None:
        self.lm.set_attn_implementation(name)

    @property
    def ranks(self) -> Ranks:
        """Those that share the weights."""
        return ALONE if self.spread is None else self.spread.ranks

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.lm.dtype if self.spread is None else self.spread.compute

    @property
    def pads(self) -> bool:
        """Whether attention lays sequences side by side, all of the longest one's length."""
        softcap = getattr(self.config, "attn_logit_softcapping", None)
        return not takes_flash(self.device, self.dtype, softcap)

    @property
    def num_cache_heads(self) -> int:
        """Heads of keys and values on this rank."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return heads // self.ranks.tp_size

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that train."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def max_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer: the generation config's and the tokenizer's."""
        stops = self.lm.generation_config.eos_token_id
        stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
        if self.tokenizer.eos_token_id is not None:
            stops.append(self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(stops))

    def hidden(self, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """[B, T] tokens and positions -> [B, T, H] last hidden states. For engines: never compiled."""
        with self._uncompiled():
            return self.root(lambda: self._hidden_of(self.trunk, token_ids, position_ids, attend))

    @contextlib.contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Inside, layers run as they are written. Only this policy's: a stance of torch's compiler would be
        everybody's, other threads' too.
        """
        compiled = [layer._compiled_call_impl for layer in self.trunk.layers]
        for layer in self.trunk.layers:
            layer._compiled_call_impl = None
        try:
            yield
        finally:
            for layer, call in zip(self.trunk.layers, compiled, strict=True):
                layer._compiled_call_impl = call

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states -> logits of the whole vocabulary, as the model's own forward pass makes them."""
        return self.root(lambda hidden: self.vocabulary.gather(self._logits(hidden)), hidden)

    def rows(self, batch: Any) -> Tensor:
        """[N, H] hidden states that predict the completion tokens of a packed `batch.Batch`."""
        return self.root(lambda: self.rows_of(self.trunk, batch))

    def rows_of(self, trunk: nn.Module, batch: Any) -> Tensor:
        """The same by some trunk of the policy's kind (the critic's), inside a call of its root."""
        token_ids, position_ids, segments = batch.token_ids, batch.position_ids, batch.segments
        # With sequence parallelism tokens must divide among the ranks: a segment that nobody looks at fills
        # up.
        extra = 0 if self.spread is None else -len(token_ids) % self.spread.token_multiple
        if extra:
            segments = [*segments, Segment(len(token_ids), extra)]
            token_ids = F.pad(token_ids, (0, extra))
            position_ids = torch.cat([position_ids, torch.arange(extra, device=position_ids.device)])
        attend = PackedAttention(segments, self.device)
        hidden = self._hidden_of(trunk, token_ids[None], position_ids[None], attend)[0]
        return take(hidden, batch.rows)

    def statistics(
        self, rows: Tensor, batch: Any, temperature: float, reference: Tensor | None = None
    ) -> TokenStatistics:
        """Logprob and entropy [N] of every completion token, and the whole KL from `reference` [N, V]."""
        return self.root(
            lambda rows: token_statistics(
                self._logits,
                rows,
                batch.targets,
                temperature=temperature,
                reference=reference,
                vocabulary=self.vocabulary,
                matrix=self._matrix(temperature),
            ),
            rows,
        )

    def all_logprobs(self, batch: Any, temperature: float) -> Tensor:
        """[N, V] logprobs of every token of the vocabulary (of this rank's slice, where it is split)."""
        rows = self.rows(batch)
        return self.root(lambda rows: all_logprobs(self._logits, rows, temperature, self.vocabulary), rows)

    def _hidden_of(self, trunk: Any, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        return trunk(
            input_ids=token_ids, position_ids=position_ids, attend=attend, use_cache=False
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm.get_output_embeddings()(hidden)
        softcap, scaling = self._bends
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits if scaling is None else logits / scaling

    @property
    def _bends(self) -> tuple[float | None, float | None]:
        """What becomes of logits after the output matrix: a softcap (Gemma), a divisor (Granite)."""
        config = self.config
        return getattr(config, "final_logit_softcapping", None), getattr(config, "logits_scaling", None)

    def _matrix(self, temperature: float) -> Head | None:
        """`_logits` as one matrix, for kernels; None where it is more than that (an adapter, a slice)."""
        head = self.lm.get_output_embeddings()
        if type(head) is not nn.Linear or self.vocabulary is not WHOLE:
            return None
        softcap, scaling = self._bends
        return Head(head.weight, head.bias, softcap, 1 / (temperature * (scaling or 1.0)))

    def logprobs(self, batch: Any, temperature: float) -> Tensor:
        """Logprobs [N] of the completion tokens."""
        return self.statistics(self.rows(batch), batch, temperature).logprobs

    @torch.no_grad()
    def verify(self) -> None:
        """Compare our packed forward pass with the model's own on three short sequences, once."""
        self.model.eval()
        generator = torch.Generator().manual_seed(0)
        lengths = [5, 9, 3]
        rows = [torch.randint(0, self.config.vocab_size, (n,), generator=generator) for n in lengths]
        position_ids = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        packed = self.hidden(
            torch.cat(rows).to(self.device)[None],
            position_ids[None],
            PackedAttention(end_to_end(lengths), self.device),
        )
        ours = self.head(packed[0]).float()
        self.set_attention("eager")
        own = torch.cat(
            [self.lm(input_ids=row.to(self.device)[None], use_cache=False).logits[0] for row in rows]
        ).float()
        self.set_attention(NAME)
        if not own.isfinite().all():
            raise UserError(
                "The model computes numbers that are not finite: its weights are damaged or hold infinity or "
                "NaN; fetch it again."
            )
        error = (ours - own).norm() / own.norm()
        bound = 1e-3 if ours.dtype == torch.float32 and self.lm.dtype == torch.float32 else 5e-2
        if not error < bound:
            raise UserError(
                f"The architecture {type(self.lm).__name__} can't be trained on packed sequences yet: our "
                "forward pass differs from "
                f"its own by {error:.1e}. Choose a Llama, Qwen, Mistral, SmolLM, Gemma or Phi model."
            )


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device is cuda, but torch sees no CUDA GPU here: set device=cpu, or install a CUDA build of "
            "torch and its driver."
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def load_policy(
    config: ModelConfig, weights: str | Path | None = None, device: torch.device | None = None
) -> Policy:
    """The policy of a configuration, whole on one device; `weights` names a checkpoint folder to take the
    weights (or the adapter) from. A model that is itself an adapter goes on with it under use_peft, and is
    merged into its base otherwise.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # the run's own line says what it is doing
    home = choose_device(config.device)
    adapter = weights is not None and (Path(weights) / "adapter_config.json").is_file()
    start = None
    if weights is None or adapter:
        base, start = foundation(config.model_name_or_path)
    else:
        base = resolve(str(weights))
    for folder in (base, start):
        if folder is not None and folder != str(weights):  # those of a run to resume have been verified
            verify_folder(Path(folder))
    tokenizer, model = load_pretrained(base, compute_dtype(config, home))
    if model._hf_peft_config_loaded:  # transformers has put an adapter of the hub into it by itself
        raise UserError(f"{base} is an adapter: fetch it, and give its folder as model_name_or_path.")
    device = device or home
    model.to(device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if adapter or config.use_peft or start is not None:
        model = _adapted(model, config, str(weights) if adapter else None, start)
    enable_checkpointing(model, config)
    policy = Policy(model, tokenizer, device)
    policy.verify()
    return policy


def _adapted(model: Any, config: ModelConfig, checkpoint: str | None, start: str | None) -> Any:
    """`model` with the adapter of a checkpoint, of the folder that the run begins from, or a new one."""
    from whetstone.model.lora import add_lora, check_rank, merge_lora

    if checkpoint is not None:
        return add_lora(model, config, checkpoint)
    if start is not None and not config.use_peft:
        return merge_lora(model, start)
    if start is not None:
        check_rank(config, start)
    return add_lora(model, config, start)


def should_compile(config: ModelConfig, policy: Policy) -> bool:
    """`auto`: on a GPU, where the model is large enough for a compiler's half minute to come back. Layers
    that are split among tensor-parallel ranks run as they are written: torch's compiler does not get through
    their distributed tensors with lengths that vary.
    """
    if policy.ranks.tp_size > 1:
        return False
    if config.torch_compile != "auto":
        return config.torch_compile
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    return policy.device.type == "cuda" and size >= COMPILED_FROM


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if config.bf16 and device.type == "cuda" else torch.float32


def enable_checkpointing(model: Any, config: ModelConfig) -> None:
    """All layers, where the configuration says so; `auto` is decided later (budget.py)."""
    if config.gradient_checkpointing is True:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
