"""The model that is trained: loading, precision, LoRA, and one way to run it on packed sequences.

`Policy.hidden` runs the transformers trunk with our attention, `Policy.head` gives logits. At the start both
are compared with the model's own forward pass: an architecture that our attention cannot serve is refused,
never trained wrongly. Sampling is the engines' business, losses and optimisers the update's.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.config.rooms import ModelRoom
from whetstone.errors import UserError
from whetstone.model.attention import NAME, Attend, PackedAttention, end_to_end, take
from whetstone.model.embedded import resolve
from whetstone.model.logprobs import TokenStatistics, token_statistics


class Policy:
    """A causal language model with its tokenizer, on one device."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device):
        self.model = model  # as saved: a transformers model, or peft's wrapper around one
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

    def set_attention(self, name: str) -> None:
        self.lm.set_attn_implementation(name)

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
        """[B, T] tokens and positions -> [B, T, H] last hidden states."""
        return self.trunk(
            input_ids=token_ids, position_ids=position_ids, attend=attend, use_cache=False
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states -> logits, as the model's own forward pass makes them."""
        logits = self.lm.get_output_embeddings()(hidden)
        softcap = getattr(self.config, "final_logit_softcapping", None)  # Gemma
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        scaling = getattr(self.config, "logits_scaling", None)  # Granite
        return logits if scaling is None else logits / scaling

    def rows(self, batch: Any) -> Tensor:
        """[N, H] hidden states that predict the completion tokens of a packed `batch.Batch`."""
        attend = PackedAttention(batch.segments, self.device)
        hidden = self.hidden(batch.token_ids[None], batch.position_ids[None], attend)[0]
        return take(hidden, batch.rows)

    def statistics(
        self, rows: Tensor, batch: Any, temperature: float, reference: Tensor | None = None
    ) -> TokenStatistics:
        """Logprob and entropy [N] of every completion token, and the whole KL from `reference` [N, V]."""
        return token_statistics(self.head, rows, batch.targets, temperature=temperature, reference=reference)

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


def load_policy(config: ModelRoom, weights: str | Path | None = None) -> Policy:
    """The policy of a configuration; `weights` names a checkpoint folder to take the weights (or the adapter)
    from.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if config.model_name_or_path == "pebble":  # too small for bars to be worth looking at
        transformers_logging.disable_progress_bar()
    device = choose_device(config.device)
    dtype = torch.bfloat16 if config.bf16 and device.type == "cuda" else torch.float32
    adapter = weights is not None and (Path(weights) / "adapter_config.json").is_file()
    base = resolve(config.model_name_or_path if weights is None or adapter else str(weights))
    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"The model '{base}' can't be loaded ({reason}): give a folder with config.json, weights and "
            "tokenizer, "
            "a hub name you have access to, pebble or smollm2-135m."
        ) from None
    model.to(device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if adapter or config.use_peft:
        from whetstone.model.lora import add_lora

        model = add_lora(model, config, str(weights) if adapter else None)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.use_peft:
            model.enable_input_require_grads()
    policy = Policy(model, tokenizer, device)
    policy.verify()
    return policy
