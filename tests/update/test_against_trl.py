"""Every loss that TRL 1.16 has too: the same batch through TRL's own `_compute_loss` and through our update.

Real TRL, two layers of the embedded model, float32: values to 1e-5, gradients to 1e-4. The old logprobs are
made up, so that ratios leave the clip; the reference's as well, so that the KL is not 0. Where we differ: TRL
averages bnpo, the entropy bonus and the entropy quantile per micro-batch; ours are counted over the whole
step, so that they do not depend on it. With one micro-batch, as here, both are the same.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.trl_losses import old_logprobs, ours, reference_of, relative_difference, theirs
from whetstone.config.sections import ModelConfig
from whetstone.model.policy import load_policy
from whetstone.types import Completion, Finish, Rollout, Score, Turn
from whetstone.update.packing import Sample

trl = pytest.importorskip("trl")

SIZES = [
    (9, 7),
    (9, 3),
    (9, 12),
    (6, 1),
    (6, 5),
    (6, 9),
]  # prompt and completion lengths, two groups of three
ADVANTAGES = [1.0, -0.5, 0.7, -1.2, 0.0, -0.3]
MAX_LENGTH = 16


@pytest.fixture(scope="module")
def policy():
    """The embedded model with its first two layers: losses differ in what comes behind the last one."""
    policy = load_policy(ModelConfig(model_name_or_path="pebble", device="cpu"))
    del policy.trunk.layers[2:]
    policy.lm.config.num_hidden_layers = 2
    return policy


@pytest.fixture(scope="module")
def samples(policy):
    generator = torch.Generator().manual_seed(3)
    made, prompts = [], {}
    for (prompt, completion), advantage in zip(SIZES, ADVANTAGES, strict=True):
        prompts.setdefault(prompt, torch.randint(5, 100, (prompt,), generator=generator).tolist())
        tokens = torch.randint(5, 100, (completion,), generator=generator).tolist()
        made.append((prompts[prompt], tokens, advantage))
    made = [(*entry, old_logprobs(policy, entry[0], entry[1], generator)) for entry in made]
    return [
        Sample(
            rollout=Rollout(
                prompt_ids=tuple(prompt),
                turns=(
                    Turn(
                        completion=Completion(
                            token_ids=tuple(tokens),
                            logprobs=tuple(old.tolist()),
                            finish=Finish.STOP,
                            policy_version=0,
                        )
                    ),
                ),
                text="",
                score=Score(reward=advantage, parts={"correct": 0.0}, answer=None),
            ),
            index=place,
            keep=True,
        )
        for place, (prompt, tokens, advantage, old) in enumerate(made)
    ]


@pytest.fixture(scope="module")
def trainer(policy, tmp_path_factory):
    import copy

    from datasets import Dataset

    model = copy.deepcopy(policy.lm)
    model.set_attn_implementation("sdpa")
    args = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=MAX_LENGTH,
        beta=0.1,
    )
    made = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1 + 1"] * 6}),
        processing_class=policy.tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    return made


def trl_inputs(samples, keep):
    widest = (
        max(len(s.rollout.prompt_ids) for s in samples),
        max(len(s.rollout.completion.token_ids) for s in samples),
    )
    tensors = {name: [] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old")}
    for sample, kept in zip(samples, keep, strict=True):
        prompt, done = list(sample.rollout.prompt_ids), sample.rollout.completion
        left, right = widest[0] - len(prompt), widest[1] - len(done.token_ids)
        tensors["prompt_ids"].append([0] * left + prompt)
        tensors["prompt_mask"].append([0] * left + [1] * len(prompt))
        tensors["completion_ids"].append([*done.token_ids] + [0] * right)
        tensors["completion_mask"].append([int(kept)] * len(done.token_ids) + [0] * right)
        tensors["old"].append([*done.logprobs] + [0.0] * right)
    inputs = {name: torch.tensor(rows) for name, rows in tensors.items()}
    old = inputs.pop("old")
    return {
        **inputs,
        "advantages": torch.tensor([sample.rollout.score.reward for sample in samples]),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference_of(old, inputs["completion_ids"]),
        "num_items_in_batch": inputs["completion_mask"].sum(),
    }


ALL = [True] * len(SIZES)
VARIANTS = {
    "plain": ({}, ALL),
    "beta": ({"beta": 0.1}, ALL),
    "beta without bias correction": ({"beta": 0.1, "use_bias_correction_kl": False}, ALL),
    "clip higher": ({"epsilon_high": 0.28}, ALL),
    "two-sided clip": ({"delta": 1.6}, ALL),
    "off-policy mask": ({"off_policy_mask_threshold": 0.02, "beta": 0.05}, ALL),
    "truncated masked": ({"beta": 0.1}, [True, False, True, True, True, False]),
    "sequence ratio": ({"importance_sampling_level": "sequence", "beta": 0.1}, ALL),
    "entropy bonus": ({"entropy_coef": 0.02}, ALL),
    "high entropy only": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.02}, ALL),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo"])
def test_same_value_and_same_gradient_as_trl(policy, trainer, samples, loss_type, variant):
    changes, keep = VARIANTS[variant]
    if loss_type == "cispo" and ("epsilon_high" in changes or "delta" in changes):
        pytest.skip("cispo has one bound, which is tested as it is")
    settings = {"loss_type": loss_type, **changes}
    their_loss, their_gradient = theirs(trainer, trl_inputs(samples, keep), settings)
    kept = [replace(sample, keep=is_kept) for sample, is_kept in zip(samples, keep, strict=True)]
    our_loss, our_gradient = ours(policy, kept, settings, MAX_LENGTH)
    assert our_loss == pytest.approx(their_loss, abs=1e-5, rel=1e-5)
    assert relative_difference(our_gradient, their_gradient) < 1e-4
