"""Trial steps, which only a GPU makes (the micro-batch size, compilation), for every value of each option
that reaches them: they run, and nothing is changed afterwards.
"""

import functools
import itertools
from typing import Any, get_args

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import gradient_of, make_samples, with_lora
from whetstone.config import build, make_plan
from whetstone.config.losses import LOSSES
from whetstone.config.sections import CriticConfig, LossConfig, UpdateConfig
from whetstone.model.compilation import compile_layers
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.types import Group, Problem
from whetstone.update.micro_batch_size import synthetic_batch
from whetstone.update.packing import pack
from whetstone.update.updater import Updater

Settings = dict[str, Any]


def values_of(section: Any, key: str) -> list[Settings]:
    return [{key: value} for value in get_args(section.model_fields[key].annotation)]


def combined(*choices: list[Settings]) -> list[Settings]:
    return [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*choices)]


ADVANTAGES = values_of(LossConfig, "advantage")
REWARD_KL = [{"beta": 0.1, "target_kl": 0.02, "kl_in": "reward"}]
CASES: dict[str, list[Settings]] = {
    "losses": [
        *[{"loss_type": name} for name in LOSSES],
        *values_of(LossConfig, "importance_sampling_level"),
    ],
    "advantages": [
        *combined(ADVANTAGES, [{}, {"turn_credit": "turn"}]),
        *values_of(LossConfig, "scale_rewards"),
    ],
    "KL": [
        *combined(
            values_of(LossConfig, "kl_reference"),
            values_of(LossConfig, "kl_estimator"),
            [{"beta": 0.1, "target_kl": 0.02, "entropy_coef": 0.01}],
        ),
        *combined([{"kl_reference": "base"}, {"kl_reference": "moving"}], REWARD_KL, ADVANTAGES),
    ],
    "critic": combined(
        [{"advantage": "gae"}],
        values_of(CriticConfig, "critic"),
        [{"value_clip": None}, {"num_generations": 1}, {"critic_warmup_steps": 9}],
    ),
    "masks": [
        *values_of(LossConfig, "importance_correction"),
        {"off_policy_mask_threshold": 0.1},
        {"top_entropy_quantile": 0.2},
        {"entropy_coef": 0.01, "entropy_target": 2.0},
        {"mask_truncated_completions": True},
        {"mask_truncated_completions": True, "top_entropy_quantile": 0.2, "advantage": "gae"},
    ],
    "updates": [
        {"steps_per_generation": 2},
        {"num_iterations": 2},
        *values_of(UpdateConfig, "optim"),
        {"num_generations": 1, "advantage": "reinforce_pp"},
    ],
}
BASE = {"max_steps": 4, "max_completion_length": 16, "num_generations": 3, "prompts_per_step": 2}


def policy_of(kind: str) -> Policy:
    policy = make_policy()
    return with_lora(policy, lora_dropout=0.1) if kind == "LoRA" else policy


def updater_of(policy: Policy, settings: Settings) -> Updater:
    config = build({**BASE, **settings})
    loss, reference = config.loss, None
    if loss.beta > 0 and loss.kl_reference != "rollout":
        reference = Reference.from_policy(policy, policy, moving=loss.kl_reference == "moving")
    return Updater(policy, config, make_plan(config, num_problems=100), reference)


def state_of(updater: Updater) -> list[torch.Tensor]:
    """A copy of everything that a step could change: weights, critic, reference, moments, random numbers."""
    tensors = [*updater.policy.model.state_dict().values(), torch.get_rng_state()]
    if updater.critic is not None:
        tensors += updater.critic.parameters()
    for part in updater.state_tensors().values():
        for value in part.values():
            tensors += value.values() if isinstance(value, dict) else [value]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("kind", ["whole", "LoRA"])
@pytest.mark.parametrize("name", CASES)
def test_every_setting_has_a_planned_size(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """The arithmetic that chooses the first trial on a GPU: less memory, never more tokens."""
    policy = policy_of(kind)
    rollouts = tuple(
        sample.rollout for sample in synthetic_batch(40, longest=20, prompt=8, vocab_size=97).samples
    )
    group = Group(problem=Problem(id="0", task="none", messages=(), answer=""), rollouts=rollouts)
    updaters = [updater_of(policy, settings) for settings in CASES[name]]
    monkeypatch.setattr(policy, "device", torch.device("cuda"))
    for updater in updaters:
        tokens = []
        for size in (80e9, 4e9):
            monkeypatch.setattr("whetstone.update.updater.usable_memory", lambda _, size=size: size)
            planned = updater._planned_size([group], allow_checkpointing=True)
            assert planned is not None
            tokens.append(planned.tokens)
        assert tokens[0] >= tokens[1] > 0


@pytest.mark.parametrize("kind", ["whole", "LoRA"])
@pytest.mark.parametrize("name", CASES)
def test_a_trial_step_runs_and_changes_nothing(name: str, kind: str):
    policy = policy_of(kind)
    for settings in CASES[name]:
        updater = updater_of(policy, settings)
        batch = synthetic_batch(40, longest=20, prompt=8, vocab_size=97)
        before, scalars = state_of(updater), updater.state_scalars()
        updater.trial_step([batch, batch])
        after = state_of(updater)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), settings
        assert updater.state_scalars() == scalars and updater.consecutive_skips == 0, settings
        trained = [*policy.parameters(), *(updater.critic.parameters() if updater.critic else [])]
        assert all(parameter.grad is None for parameter in trained), settings
        assert not updater.optimizer._sums and not updater.accumulator.tokens.rows(range(9)), settings


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("whole", {"advantage": "rloo", "top_entropy_quantile": 0.2}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("whole", {"beta": 0.1, "kl_in": "reward"}),
                ("whole", {"advantage": "gae", "critic": "model"}),
                ("LoRA", {"advantage": "gae", "entropy_coef": 0.01}),
                ("LoRA", {"beta": 0.1, "kl_reference": "moving", "kl_estimator": "full"}),
                ("LoRA", {"beta": 0.1, "advantage": "gae", "critic": "model"}),
                ("LoRA", {"loss_type": "sft"}),
            )
        ),
    ],
)
def test_compiling_at_the_first_batch_changes_no_gradient(kind, settings, monkeypatch):
    """Without a code generator, which takes minutes; everything around it is as on a GPU."""
    torch._dynamo.reset()
    backend = functools.partial(compile_layers, backend="aot_eager")
    monkeypatch.setattr("whetstone.update.updater.compile_layers", backend)
    batches = pack(make_samples(make_policy()), 1000)
    gradients = []
    for compiles in (False, True):
        policy = with_lora(make_policy()) if kind == "LoRA" else make_policy()
        updater = updater_of(policy, {**settings, "torch_compile": compiles})
        before = state_of(updater)
        assert updater.micro_batch_tokens([]) == 8192
        assert updater.policy.layers[0]._compiled_call_impl is not None or not compiles
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(updater), strict=True))
        gradients.append(gradient_of(updater, batches)[0])
    plain, compiled = gradients
    assert plain.norm() > 1e-3 and (compiled - plain).norm() / plain.norm() < 1e-5
    torch._dynamo.reset()
