"""Tiny models of the architectures that people train, and what each of them runs on.

python -m tests.support.models > docs/models.md
"""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.conftest import TINY, Characters
from tests.support.engines import collect
from tests.support.update import gradient_of, make_samples, reference_gradient, updater_for
from whetstone.config import build
from whetstone.engines import make_engine
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.model.hub import resolve
from whetstone.model.policy import Policy
from whetstone.types import Rollout, Score, Turn
from whetstone.update.packing import Sample, pack

WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENT = {
    **ROUTED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
}
CONVOLUTION = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 16,
}
STATE_SPACE = {
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
}
SCALED = {  # queries are scaled by position, from the 32nd token on
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
}
# transformers' model_type -> (models of this architecture, settings of a tiny one)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama 2 to 3.3, SmolLM 1 and 2, TinyLlama, Yi, R1-Distill-Llama", {}),
    "llama4_text": ("Llama 4 (text)", EXPERTS),
    "qwen2": ("Qwen 2, Qwen 2.5, Qwen2.5-Math and -Coder, R1-Distill-Qwen", {}),
    "qwen2_moe": ("Qwen1.5-MoE, Qwen2-MoE", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen 3", {}),
    "qwen3_moe": ("Qwen 3 MoE (30B-A3B)", EXPERTS),
    "qwen3_next": ("Qwen3-Next", {**EXPERTS, **LINEAR}),
    "qwen3_5_text": ("Qwen 3.5 (text)", LINEAR),
    "qwen3_5_moe_text": ("Qwen 3.5 MoE (text)", {**EXPERTS, **LINEAR}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {**WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma 3 (text)", {**WINDOW, "query_pre_attn_scalar": 8}),
    "gemma4_text": (
        "Gemma 4 (text)",
        {**WINDOW, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    ),
    "mistral": ("Mistral 7B, Mistral Nemo, Mistral Small (text)", WINDOW),
    "ministral3": ("Ministral 3 (text)", SCALED),
    "mixtral": ("Mixtral", EXPERTS),
    "phi3": ("Phi-3, Phi-3.5, Phi-4", {}),
    "phimoe": ("Phi-3.5-MoE", EXPERTS),
    "smollm3": ("SmolLM 3", {"num_hidden_layers": 4}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", WINDOW),
    "olmoe": ("OLMoE", EXPERTS),
    "granite": ("Granite 3", {}),
    "granitemoe": ("Granite 3 MoE", EXPERTS),
    "gpt_oss": ("gpt-oss", {**EXPERTS, **WINDOW}),
    "deepseek_v3": ("DeepSeek V3, R1; Kimi K2", LATENT),
    "lfm2": ("LFM2", CONVOLUTION),
    "falcon_h1": ("Falcon-H1", STATE_SPACE),
    "glm4": ("GLM-4", {}),
    "glm4_moe": ("GLM-4.5", ROUTED),
    "exaone4": ("EXAONE 4", {}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "hunyuan_v1_dense": ("Hunyuan (dense)", {}),
    "seed_oss": ("Seed-OSS", {}),
    "apertus": ("Apertus", {}),
    "cohere2": ("Command R7B, Command A", WINDOW),
    "starcoder2": ("StarCoder 2", {}),
    "stablelm": ("StableLM", {}),
    "nanochat": ("nanochat", {}),
    "gpt2": ("GPT-2", {}),
}
# Text models inside one that sees images: their classes, and settings of the towers beside `TOWER`.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", LINEAR, {}),
    "gemma3": ("Gemma3ForConditionalGeneration", {}, {}),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        {"deepstack_visual_indexes": [0]},
    ),
    "mistral3": ("Mistral3ForConditionalGeneration", {"model_type": "mistral"}, {"model_type": "pixtral"}),
}
TOWER = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 4,
}
PAGE = """\
# Models

Reference: which architectures run, and how. Written by `python -m tests.support.models`, which examines a
tiny model with random weights of each; `tests/model/test_architectures.py` repeats it.

For each: the gradient of the update equals that of float64, one sequence at a time, to 1e-5; the engine
samples the greedy tokens of `model.generate`.

- **packed**: sequences are concatenated without padding. **padded**: the model's own forward pass on padded
  rows, which is slower; for convolutions, recurrences and attention that our kernels do not know. The run
  says so at its start. Padded models need a single process.
- **fused**: the native engine with fused layers. **modules**: the native engine with the model's own modules,
  which is slower. **generate**: transformers' `generate`, slower still; vLLM is an alternative
  ([servers.md](servers.md)).

With LongRoPE (Phi-3.5, Phi-4-mini) a sequence may have the length of the short factors, 4,096 tokens. Longer
ones have other factors for all their tokens, those that were sampled before included. Phi-4-mini rotates
a part of each head, so it is sampled with its own modules.

Gated delta layers (Qwen 3.5, Qwen3-Next) use flash-linear-attention where it is installed. It refuses Triton
3.4.0 to 3.7.0 on a Hopper GPU: torch's rule computes them there, which is slower; the run and `whet doctor`
say so. `whet plan` names a model that transformers' `generate` samples.

A text model inside one that sees images (Qwen 3.5, Qwen3-VL, Gemma 3, Mistral Small 3) is trained on text.
The rest is neither used nor trained. It is written as it was, with the settings of its processor. It needs a
single process. Layers that predict several tokens (`mtp.*`) are not kept: the run says so at its start.

Any other causal language model of transformers is tried in the same way at the start of a run. It is refused
only if the logits of its padded rows differ from its own. Mixtures of experts have no auxiliary loss, and
none was trained for more than some steps. Their speed: [lab/engines.md](lab/engines.md#mixture-of-experts).

The last columns are the difference of logprobs between engine and trainer, for 12 completions of 32 tokens at
temperature 1 on a CPU: the largest in float32, the mean in bf16. In bf16 engine and trainer may route a token
of a mixture of experts to different experts. Every run logs the difference for its own model
(`sampling/sampling_logp_difference/mean`).

| models | architecture | update | rollouts | float32 | bf16 |
|---|---|---|---|---|---|
"""
PROMPTS = [(5, 9, 33, 8), (7, 3, 41, 60, 61, 62, 13, 20, 21, 22, 23), (11, 12)]


@dataclass(frozen=True, kw_only=True)
class Examination:
    architecture: str
    update: str  # packed or padded
    engine: str  # fused, modules or generate
    gradient_error: float  # against float64, one sequence at a time
    tokens_equal: bool  # greedy tokens of the engine and of model.generate
    generate_difference: float  # the largest of their logprobs
    trainer_difference: float  # the largest of sampled tokens between engine and trainer
    half_gradient_error: float  # of the gradient in bf16
    half_engine: str  # in bf16
    half_difference: float  # the mean of those in bf16

    def path(self, model_type: str) -> str:
        """The row of the page up to its figures."""
        return f"| {MODELS[model_type][0]} | `{self.architecture}` | {self.update} | {self.engine} |"

    def row(self, model_type: str) -> str:
        figures = (f"{value:.0e}" for value in (self.trainer_difference, self.half_difference))
        cells = (text.replace("e-0", "e-").replace("0e+00", "0") for text in figures)
        return f"{self.path(model_type)} {' | '.join(cells)} |"


def tiny_policy(model_type: str) -> Policy:
    """A policy with random weights, verified as a loaded one is."""
    settings = {**TINY, **MODELS[model_type][1]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings)).float()
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that attention matters
            if parameter.dim() > 1:
                parameter.mul_(2)
    policy = Policy(model, Characters(), torch.device("cpu"))
    policy.verify()
    return policy


def write_tiny(model_type: str, folder: Path) -> set[str]:
    """A tiny model with random weights and buffers, and pebble's tokenizer; returns the buffers' names."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve("pebble"))
    own = WRAPPERS[model_type][1] if model_type in WRAPPERS else MODELS[model_type][1]
    settings = {**TINY, **own, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    settings |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if "vocab_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = len(tokenizer)
    torch.manual_seed(0)
    if model_type in WRAPPERS:
        settings["tie_word_embeddings"] = True
        tower = {**TOWER, **WRAPPERS[model_type][2]}
        parts: Any = {"text_config": settings, "vision_config": tower, "tie_word_embeddings": True}
        config = CONFIG_MAPPING[model_type](**parts)
        model = AutoModelForImageTextToText.from_config(config).float()
        (folder / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')
    else:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings)).float()
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {name for name, _ in model.named_buffers() if name in kept}


def examine(model_type: str) -> Examination:
    policy = tiny_policy(model_type)
    samples = make_samples(policy)
    experts = getattr(policy.lm.config, "_experts_implementation", None)
    policy.lm.set_experts_implementation("eager")  # the faster one has no float64
    expected = reference_gradient(policy, samples, "dapo", temperature=1.0)
    policy.lm.set_experts_implementation(experts)
    gradient, _ = gradient_of(updater_for(policy), pack(samples, max_tokens=30))
    policy.model.zero_grad()
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, seeds=(1,)) for prompt in PROMPTS]
    engine = make_engine(build({}), policy)
    ours, own = collect(engine, requests, sampling), collect(HFEngine(policy, 9, None), requests, sampling)
    pairs = [(a, b) for key in own for a, b in zip(ours[key].logprobs, own[key].logprobs, strict=True)]
    half = tiny_policy(model_type)
    half.model.bfloat16()
    half_gradient, _ = gradient_of(updater_for(half), pack(samples, max_tokens=30))
    half_engine = make_engine(build({}), half)
    return Examination(
        architecture=type(policy.lm).__name__,
        update="packed" if policy.is_packed else "padded",
        engine=_path(engine),
        gradient_error=float((gradient - expected).norm() / expected.norm()),
        tokens_equal=all(ours[key].token_ids == own[key].token_ids for key in own),
        generate_difference=max(abs(a - b) for a, b in pairs),
        trainer_difference=float(trainer_differences(policy, engine).max()),
        half_gradient_error=float((half_gradient - expected).norm() / expected.norm()),
        half_difference=float(trainer_differences(half, half_engine).mean()),
        half_engine=_path(half_engine),
    )


@torch.no_grad()
def trainer_differences(policy: Policy, engine: Any) -> Tensor:
    """How far the logprobs of sampled tokens are from those of the update, in absolute value."""
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3, 4)) for prompt in PROMPTS]
    sampling = SamplingParams(max_tokens=32, temperature=1.0, ignore_eos=True)
    score = Score(reward=0.0, parts={"correct": 0.0}, answer=None)
    rollouts = [
        Rollout(prompt_ids=PROMPTS[request], turns=(Turn(completion=completion),), text="", score=score)
        for (request, _), completion in collect(engine, requests, sampling).items()
    ]
    samples = [Sample(rollout=rollout, index=n, keep=True) for n, rollout in enumerate(rollouts)]
    differences = []
    for batch in pack(samples, max_tokens=200):
        sampled = [logprob for sample in batch.samples for logprob in sample.rollout.completion.logprobs]
        differences.append((policy.logprobs(batch, 1.0).float() - torch.tensor(sampled)).abs())
    return torch.cat(differences)


def _path(engine: Any) -> str:
    if isinstance(engine, HFEngine):
        return "generate"
    return "fused" if type(engine.engine.step).__name__ == "CpuLayerStep" else "modules"


def page(rows: list[str]) -> str:
    return PAGE + "\n".join(rows) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(page([examine(model_type).row(model_type) for model_type in MODELS]), end="")


if __name__ == "__main__":
    main()
