"""Samples, updaters and gradients of a tiny policy."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from whetstone.config import build, make_plan
from whetstone.config.sections import ModelConfig
from whetstone.model.lora import add_lora
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish, Rollout, Score, Turn
from whetstone.update.packing import Sample
from whetstone.update.updater import Updater

# Prompt and completion lengths: three completions share the first prompt, two the second.
SIZES = [(4, 7), (4, 3), (4, 12), (9, 1), (9, 5), (8, 8)]


PARTS_OF_A_LAYER = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp")
ADVANTAGES = [1.0, -0.5, 0.7, -1.2, 0.3, -0.3]


def with_lora(policy: Policy, lora_dropout: float = 0.0) -> Policy:
    """`policy` with an adapter on every linear layer, whose matrices are random and always the same."""
    settings = ModelConfig(use_peft=True, lora_r=4, lora_alpha=12, lora_dropout=lora_dropout)
    model = add_lora(policy.model, settings, None)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Policy(model, policy.tokenizer, policy.device)


def with_small_adapter(policy: Policy, **settings) -> Policy:
    """`policy` in bf16 with an adapter that changes weights of about 0.1 by 1e-4 at most: half a step of bf16
    is 2.4e-4 there.
    """
    model = add_lora(policy.model.bfloat16(), ModelConfig(use_peft=True, lora_r=4, **settings), None)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "lora_B"):
            up = layer.lora_B["default"].weight
            up.data.copy_(torch.randn(up.shape, generator=generator))
            up.data *= 1e-4 / layer.get_delta_weight("default").abs().max()
    model.eval()
    return Policy(model, policy.tokenizer, policy.device)


def share_kept(output: torch.Tensor, base: torch.Tensor, change: torch.Tensor) -> float:
    """Of a small `change`, how much an output in half precision has kept: 1, but for its noise."""
    change = change.double()
    return ((output.double() - base.double()) * change).sum().item() / change.square().sum().item()


def shares_kept(layer: Any, exact: Any) -> dict[str, float]:
    """`share_kept` of an adapter's change in parts of a decoder layer; `exact`: the same layer in float64."""
    generator = torch.Generator().manual_seed(1)
    shares = {}
    for name in PARTS_OF_A_LAYER:
        module = layer.get_submodule(name)
        width = module.hidden_size if name == "mlp" else module.in_features
        x = torch.randn(100, width, generator=generator).bfloat16().to(next(layer.parameters()).device)
        adapted, base = _with_and_without_adapter(exact.get_submodule(name), x.double())
        output, base_output = _with_and_without_adapter(module, x)
        shares[name] = share_kept(output, base_output, adapted - base)
    return shares


@torch.no_grad()
def _with_and_without_adapter(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    outputs = []
    for is_on in (True, False):
        for layer in module.modules():
            if hasattr(layer, "lora_B"):
                layer.enable_adapters(is_on)
        outputs.append(module(x))
    return outputs


def make_samples(policy, sampler_shift=0.0):
    generator = torch.Generator().manual_seed(1)
    samples: list[Sample] = []
    for (prompt, completion), advantage in zip(SIZES, ADVANTAGES, strict=True):
        ids = torch.randint(3, 97, (prompt + completion,), generator=generator).tolist()
        if samples and len(samples[-1].rollout.prompt_ids) == prompt:
            ids[:prompt] = samples[-1].rollout.prompt_ids
        logprobs = sequence_logprobs(policy, ids, prompt).detach() + sampler_shift
        done = Completion(
            token_ids=tuple(ids[prompt:]),
            logprobs=tuple(logprobs.tolist()),
            finish=Finish.STOP,
            policy_version=0,
        )
        score = Score(reward=advantage, parts={"correct": 0.0}, answer=None)
        rollout = Rollout(
            prompt_ids=tuple(ids[:prompt]), turns=(Turn(completion=done),), text="", score=score
        )
        samples.append(Sample(rollout=rollout, index=len(samples), keep=True))
    return samples


def with_turns(samples: list[Sample]) -> list[Sample]:
    """The same completions said in up to three turns, with observations of 1 to 5 tokens in between."""
    generator = torch.Generator().manual_seed(2)
    return [replace(sample, rollout=_in_turns(sample.rollout, generator)) for sample in samples]


def _in_turns(rollout: Rollout, generator: torch.Generator) -> Rollout:
    whole, turns = rollout.completion, []
    cuts = sorted({0, len(whole.token_ids) // 3, len(whole.token_ids) // 2, len(whole.token_ids)})
    for start, stop in pairwise(cuts):
        size = 0 if stop == cuts[-1] else int(torch.randint(1, 6, (), generator=generator))
        observation = tuple(torch.randint(3, 97, (size,), generator=generator).tolist())
        part = replace(whole, token_ids=whole.token_ids[start:stop], logprobs=whole.logprobs[start:stop])
        turns.append(Turn(completion=part, observation_ids=observation))
    return replace(rollout, turns=tuple(turns))


def rewritten(samples: list[Sample]) -> list[Sample]:
    """The same turns, each behind the first of a rollout with a context of its own, of one of these kinds:
    the old one without its end, a wholly new one, the one of the turn before last with more behind it.
    """
    generator = torch.Generator().manual_seed(3)
    changed = []
    for number, sample in enumerate(with_turns(samples)):
        turns, before = list(sample.rollout.turns), [sample.rollout.prompt_ids]
        for place in range(1, len(turns)):
            whole = (*before[-1], *turns[place - 1].completion.token_ids)
            new = tuple(torch.randint(3, 97, (4,), generator=generator).tolist())
            kinds = ((*whole[:-1], *new), new, (*before[max(0, len(before) - 2)], *new), before[-1])
            context = kinds[(number + place) % len(kinds)]
            turns[place - 1] = replace(turns[place - 1], observation_ids=())
            turns[place] = replace(turns[place], context_ids=context)
            before.append(context)
        changed.append(replace(sample, rollout=replace(sample.rollout, turns=tuple(turns))))
    return changed


def all_ids(rollout: Rollout) -> list[int]:
    """Prompt, completions and observations in order."""
    parts = [(*turn.completion.token_ids, *turn.observation_ids) for turn in rollout.turns]
    return [*rollout.prompt_ids, *(token for part in parts for token in part)]


def predicting_positions(rollout: Rollout) -> list[int]:
    """Where in `all_ids` each token of the completions is predicted: one before it."""
    positions, end = [], len(rollout.prompt_ids)
    for turn in rollout.turns:
        positions += range(end - 1, end - 1 + len(turn.completion.token_ids))
        end += len(turn.completion.token_ids) + len(turn.observation_ids)
    return positions


def sequence_logprobs(policy, ids, prompt, temperature=1.0):
    """The plain way: one sequence at a time through the model's own forward pass."""
    name = policy.lm.config._attn_implementation
    policy.set_attention("eager")
    logits = policy.lm(input_ids=torch.tensor([ids])).logits[0] / temperature
    policy.set_attention(name)
    return logits.log_softmax(-1)[torch.arange(prompt - 1, len(ids) - 1), torch.tensor(ids[prompt:])]


def packed_and_padded(policy, batch):
    """Logprobs of a batch by packed attention, and by padded rows through the model's own forward pass."""
    with torch.no_grad():
        packed = policy.logprobs(batch, 1.0)
        policy.is_packed = False
        policy.restore_attention()
        return packed, policy.logprobs(batch, 1.0)


def flat_gradient(policy):
    return torch.cat([p.grad.detach().double().flatten() for p in policy.parameters()])


def reference_gradient(policy, samples, loss_type, temperature):
    """-sum of weight x advantage x logprob: what every clipped loss comes to at ratio 1, in float64."""
    policy.model.double()
    policy.model.zero_grad()
    total = sum(len(s.rollout.completion.token_ids) for s in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for s in samples:
        length = len(s.rollout.completion.token_ids)
        weight = 1 / total
        if loss_type in ("grpo", "gspo", "sapo"):
            weight = 1 / (length * len(samples))
        elif loss_type == "dr_grpo":
            weight = 1 / (len(samples) * 16)
        ids = [*s.rollout.prompt_ids, *s.rollout.completion.token_ids]
        logprobs = sequence_logprobs(policy, ids, len(s.rollout.prompt_ids), temperature)
        loss = loss - weight * s.rollout.score.reward * logprobs.sum()
    loss.backward()
    gradient = flat_gradient(policy)
    policy.model.float()
    policy.model.zero_grad()
    return gradient


def updater_for(policy, reference=None, **flat) -> Any:
    flat = {
        "max_steps": 4,
        "max_completion_length": 16,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        **flat,
    }
    config = build(flat)
    plan = replace(make_plan(config, num_problems=100), num_generations=1)  # any number of samples
    updater: Any = Updater(policy, config, plan, reference)
    if config.loss.advantage == "group":  # here rewards are the advantages themselves
        updater.experience_builder._with_baseline = lambda flat, *_: [
            replace(e, advantages=e.batch.rewards[e.batch.sequence_ids, 0]) for e in flat
        ]
    return updater


def train_on(updater, minibatches, seed=0):
    """All optimizer steps on a batch; returns its metrics."""
    return updater.update(updater.prepare(minibatches), seed)


def gradient_of(updater, batches):
    """The accumulated gradient of one optimizer step, caught before the weights move."""
    caught = {}

    def catch(norm):
        gradients = [gradient.double().flatten() for gradient in updater.optimizer.gradients()]
        caught["gradient"], caught["norm"] = torch.cat(gradients), norm

    updater.optimizer.step = catch
    row = train_on(updater, [batches])
    return caught["gradient"], row
