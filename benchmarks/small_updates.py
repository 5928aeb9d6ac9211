"""How much of a small update is left in bf16: what the roundings of weights and products keep of it.

    python benchmarks/small_updates.py --data gsm8k/train.jsonl         # SmolLM2-135M on a CPU, some minutes
    python benchmarks/small_updates.py --data gsm8k/train.jsonl --kind all --learning-rate 1e-6

AdamW on one worked problem a step, in float32. `kept` is the slope of the change of logprobs on other
problems over that in float32: 1 is all of the update, 0 none. `off` is the mean distance of the logprobs.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor

from whetstone.config import build
from whetstone.model.lora import short_linear
from whetstone.model.policy import Policy, load_policy
from whetstone.model.rounding import stochastic_round

MAX_TOKENS, NUM_TEXTS, FIRST_TEXT = 192, 6, 1000
Rounding = Callable[[Tensor], Tensor]


def nearest(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def stochastic(values: Tensor) -> Tensor:
    return stochastic_round(values, torch.bfloat16).float()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="rows of question and answer, JSONL")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kind", choices=["lora", "all"], default="lora", help="which weights are trained")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 20, 40], help="when it is measured")
    args = parser.parse_args()
    is_lora = args.kind == "lora"
    settings = {"use_peft": is_lora, "lora_r": 16, "lora_alpha": 32, "device": "cpu", "max_steps": 1}
    torch.manual_seed(0)
    policy = load_policy(build({"model_name_or_path": args.model, **settings}).model)
    for parameter in policy.model.parameters():  # as pretrained weights in bf16
        if not (is_lora and parameter.requires_grad):
            parameter.data = nearest(parameter.data)
    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    tokens = [torch.tensor(policy.tokenizer(text)["input_ids"][:MAX_TOKENS]) for text in texts[:100]]
    tests = texts[FIRST_TEXT : FIRST_TEXT + NUM_TEXTS]
    tests = [torch.tensor(policy.tokenizer(text)["input_ids"][:MAX_TOKENS]) for text in tests]
    print(f"{args.kind} at {args.learning_rate:g}, {sum(map(len, tests)):,} tokens of {len(tests)} problems")
    measure = measurements(policy, tests, is_lora=is_lora)
    before = {name: run() for name, run in measure.items()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0)
    for step in range(1, max(args.steps) + 1):
        train(policy, optimizer, tokens[2 * step])
        if step not in args.steps:
            continue
        exact = logprobs(policy, tests)
        change = exact - before["float32"]
        print(f"step {step}: logprobs changed by {change.abs().mean():.4f}")
        for name, run in measure.items():
            found = run()
            share = ((found - before[name]) @ change / (change @ change)).item()
            print(f"  {name}: kept {share:.2f}, off {(found - exact).abs().mean():.4f}", flush=True)


def measurements(policy: Policy, tests: list[Tensor], *, is_lora: bool) -> dict[str, Callable[[], Tensor]]:
    """Name -> logprobs of the tests, computed so with the weights of now."""

    def rounded(rounding: Rounding) -> Tensor:
        with rounded_weights(policy, rounding):
            return logprobs(policy, tests)

    def merged(rounding: Rounding) -> Tensor:
        return logprobs(merged_copy(policy, rounding), tests)

    def half(*, plain_peft: bool) -> Tensor:
        model = copy.deepcopy(policy.model).bfloat16()
        for layer in model.modules():
            if plain_peft and type(layer) is short_linear():
                layer.__class__ = Linear
        return logprobs(Policy(model, policy.tokenizer, policy.device), tests)

    measure = {"float32": lambda: logprobs(policy, tests)}
    if not is_lora:
        return measure | {
            "weights rounded to the nearest": lambda: rounded(nearest),
            "weights rounded stochastically": lambda: rounded(stochastic),
        }
    return measure | {
        "merged, rounded to the nearest": lambda: merged(nearest),
        "merged, rounded stochastically": lambda: merged(stochastic),
        "bf16, layers of peft": lambda: half(plain_peft=True),
        "bf16, our layers": lambda: half(plain_peft=False),
    }


@torch.no_grad()
def logprobs(policy: Policy, tests: list[Tensor]) -> Tensor:
    """Of every token of the tests, in float32."""
    rows = policy._packed_logits(tests).log_softmax(-1).split([len(ids) for ids in tests])
    return torch.cat([row[:-1].gather(1, ids[1:, None])[:, 0] for row, ids in zip(rows, tests, strict=True)])


def train(policy: Policy, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    policy.set_attention("sdpa")
    logits = policy.lm(input_ids=ids[None]).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    policy.restore_attention()


@contextmanager
def rounded_weights(policy: Policy, rounding: Rounding) -> Iterator[None]:
    exact = [parameter.data for parameter in policy.model.parameters()]
    for parameter in policy.model.parameters():
        parameter.data = rounding(parameter.data)
    yield
    for parameter, data in zip(policy.model.parameters(), exact, strict=True):
        parameter.data = data


@torch.no_grad()
def merged_copy(policy: Policy, rounding: Rounding) -> Policy:
    """The adapter merged into rounded weights, which compute in float32."""
    model = copy.deepcopy(policy.model)
    for layer in model.modules():
        if isinstance(layer, Linear):
            base: Any = layer.get_base_layer()
            base.weight.data = rounding(base.weight + layer.get_delta_weight("default"))
    return Policy(model.unload(), policy.tokenizer, policy.device)


if __name__ == "__main__":
    main()
