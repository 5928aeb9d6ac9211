"""Run folders with a final model that was not trained but changed, and greedy tokens of a model folder."""

from pathlib import Path
from typing import Any

import torch

from tests.support.engines import collect
from whetstone.config import build, dump
from whetstone.engines import make_engine
from whetstone.engines.base import Request, SamplingParams
from whetstone.model.hub import resolve
from whetstone.model.policy import Policy, load_policy
from whetstone.model.sharded import model_writer
from whetstone.run.checkpoint import save_model

QUESTIONS = ("What is 4 + 73 - 12?", "Spell stone backward.", "How many e are in 'eleven trees'?")
NUM_TOKENS = 16


def make_run(folder: Path, model: str = "pebble", scale: float = 0.03, **settings: Any) -> Policy:
    """Write config.yaml and final_model of a run into `folder`; returns its policy."""
    config = build(
        {
            "model_name_or_path": model,
            "datasets": {"chain_sum": {}},
            "run_name": folder.name,
            "output_dir": str(folder.parent),
            **settings,
        }
    )
    torch.manual_seed(0)  # a new adapter's weights are random
    policy = load_policy(config.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * scale)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    save_model(model_writer(policy), folder / "final_model", 3)
    return policy


def prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """Questions up to where the model thinks, so that more than an answer follows."""
    begin = tokenizer("<think>", add_special_tokens=False)["input_ids"]
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"add_generation_prompt": True, "return_dict": False}
    return [(*tokenizer.apply_chat_template(each, **options), *begin) for each in conversations]


def engine_tokens(policy: Policy) -> list[list[int]]:
    """Greedy tokens of the native engine."""
    engine = make_engine(build({}), policy)
    engine.update_weights(0)
    requests = [Request(prompt_ids=prompt, seeds=(1,)) for prompt in prompts(policy.tokenizer)]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    completions = collect(engine, requests, sampling)
    engine.close()
    return [list(completions[i, 0].token_ids) for i in range(len(requests))]


def completion_logits(model: Any, tokenizer: Any, expected: list[list[int]]) -> list[torch.Tensor]:
    """Logits of transformers' own forward pass after each prefix of what is expected."""
    logits = []
    for prompt, completion in zip(prompts(tokenizer), expected, strict=True):
        with torch.no_grad():
            row = model(torch.tensor([[*prompt, *completion[:-1]]])).logits[0]
        logits.append(row[len(prompt) - 1 :].float())
    return logits


def transformers_tokens(model: Any, tokenizer: Any, expected: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers. They equal `expected` if and only if greedy decoding does."""
    return [logits.argmax(-1).tolist() for logits in completion_logits(model, tokenizer, expected)]


def compare_rounded(rounded: Any, model: Any, tokenizer: Any, expected: list[list[int]], gap: float) -> None:
    """Greedy tokens of rounded weights are the model's wherever its two best logits differ by `gap`."""
    own = torch.cat(completion_logits(model, tokenizer, expected))
    best = own.topk(2).values
    decided = best[:, 0] - best[:, 1] > gap
    assert decided.float().mean() > 0.8, "too few tokens to compare"
    tokens = torch.tensor(
        [token for row in transformers_tokens(rounded, tokenizer, expected) for token in row]
    )
    assert torch.equal(tokens[decided], own.argmax(-1)[decided])


def tiny_model(folder: Path, model_type: str = "llama", tokenizer: Any = None, **settings: Any) -> Path:
    """A model folder with random weights and pebble's tokenizer, or another one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tokenizer = tokenizer or AutoTokenizer.from_pretrained(resolve("pebble"))
    shape = {
        "vocab_size": 106,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**shape, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases are 0 otherwise, and attention is flat
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
            assert parameter.isfinite().all(), name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
