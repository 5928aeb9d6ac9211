"""Conversations with calls of tools, through TRL 1.16's own tool loop and through ours.

The same environment in TRL's shape, the same turns of the policy: a real GRPOTrainer and our collector must
have the same tokens, the same mask, the same rewards and advantages, and the same loss. Only what the policy
says is written down, instead of sampled; on both sides everything else is real.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.corpora.model_folders import PEBBLE
from tests.environments import counter
from tests.environments.playing import call
from tests.model.test_observations import FAMILIES, make_chat
from tests.support.trl_losses import old_logprobs, ours, reference_of, relative_difference, theirs
from whetstone.config import Config, build
from whetstone.engines.base import EngineBase, GenerationOutput, Request, SamplingParams
from whetstone.environments.pool import EpisodePool
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy, load_policy
from whetstone.rollout.collector import Collector, EpisodeSettings
from whetstone.tasks.registry import environments_of, make_task
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import Finish, Group
from whetstone.update.experience import ExperienceBuilder
from whetstone.update.packing import make_samples, pack

trl = pytest.importorskip("trl")

FACTORY = f"{Path(counter.__file__)}:Counter"
STARTS = (3, 8)
GROUP, ITERATIONS, MAX_LENGTH = 3, 2, 600
TRUNCATED = "TRUNCATED"  # such a turn has no end token
# What the policy says in each turn: for each row, GROUP episodes.
TURNS = [
    [f"Seven more.\n{call('add', number=7)}", "Done."],
    [f"{call('add', number=2)}\n{call('add', number=9)}", call("add", number=4, direction="down"), "At 10?"],
    [call("add", number=1), call("add", number=2), call("add", number=4)],  # the third is one too many
    ["No idea."],
    [f"I add 1.\n{call('add', number=1)}", call("add", number=1), "Ten, I think."],
    [call("add", number=5), f"{TRUNCATED}Then I go back, and"],
]  # fmt: skip


class Script:
    """Says the turns of `TURNS`, with old logprobs that both sides get."""

    def __init__(self, policy: Policy, chat: Chat) -> None:
        self.policy, self.chat = policy, chat
        self._generator = torch.Generator().manual_seed(5)
        self._logprobs: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.reset()

    def reset(self) -> None:
        self._said: list[tuple[tuple[int, ...], int]] = [((), 0)] * len(TURNS)  # tokens so far, turns

    def say(self, episode: int, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[float, ...], Finish]:
        before, turn = self._said[episode]
        assert prompt[: len(before)] == before  # what was sampled is never tokenized again
        text = TURNS[episode][turn]
        ids = tuple(self.chat.tokenizer(text.removeprefix(TRUNCATED), add_special_tokens=False)["input_ids"])
        finish = Finish.LENGTH if text.startswith(TRUNCATED) else Finish.STOP
        ids = ids if finish is Finish.LENGTH else (*ids, self.chat.tokenizer.eos_token_id)
        if prompt + ids not in self._logprobs:  # by all tokens: sides that differ get different ones
            old = old_logprobs(self.policy, prompt, ids, self._generator)
            self._logprobs[prompt + ids] = tuple(old.tolist())
        self._said[episode] = (prompt + ids, turn + 1)
        return ids, self._logprobs[prompt + ids], finish

    def episode_of(self, prompt: tuple[int, ...]) -> int:
        """Whose history it continues."""
        [episode] = [n for n, (said, _) in enumerate(self._said) if said and prompt[: len(said)] == said]
        return episode


class ScriptEngine(EngineBase):
    def __init__(self, policy: Policy, script: Script) -> None:
        super().__init__(policy)
        self.script, self.is_begun = script, False

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        is_first, self.is_begun = not self.is_begun, True
        for number, request in enumerate(requests):
            for sample in range(len(request.seeds)):
                prompt = tuple(request.prompt_ids)
                episode = number * GROUP + sample if is_first else self.script.episode_of(prompt)
                yield self.output(number, sample, *self.script.say(episode, prompt))


class Setting(NamedTuple):
    policy: Policy
    trainer: Any
    inputs: dict[str, torch.Tensor]  # what TRL computes its loss from
    groups: list[Group]
    config: Config


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_chat(FAMILIES["qwen2.5"]).tokenizer
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.from_pretrained(
        PEBBLE, **shape, intermediate_size=128, initializer_range=0.2, vocab_size=len(tokenizer)
    )
    config.eos_token_id = tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    question = [{"role": "user", "content": "Use the tool. "}]
    rows = [{"prompt": question, "start": start} for start in STARTS]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build(
        {
            "model_name_or_path": str(folder),
            "device": "cpu",
            "developer_prompt": None,
            "datasets": {"environment": {"config": {"factory": FACTORY, "path": str(data)}}},
            "max_tool_calling_iterations": ITERATIONS,
            "reward_funcs": ["accuracy"],
            "reward_workers": 1,
            "eval_num_samples": 0,
            "num_generations": GROUP,
        }
    )
    policy = load_policy(config.model, None, torch.device("cpu"))
    script = Script(policy, Chat(policy.tokenizer, config.model))
    groups = collect(config, policy, script)
    script.reset()
    trainer = make_trainer(policy, folder, script)
    inputs = trainer._generate_and_score_completions([dict(row) for row in rows for _ in range(GROUP)])
    yield Setting(policy, trainer, inputs, groups, config)


def collect(config: Config, policy: Policy, script: Script) -> list[Group]:
    [(name, spec)] = config.tasks.datasets.items()
    task = make_task(config, name, spec, "train")
    with (
        Scorer(config) as scorer,
        EpisodePool(environments_of(config), timeout_s=20.0, memory_mb=512) as pool,
    ):
        collector = Collector(
            ScriptEngine(policy, script),
            scorer,
            script.chat,
            max_prompt_length=None,
            max_length=policy.max_length,
            episodes=EpisodeSettings(pool=pool, config=config.environments),
        )
        problems = sorted((task.problem(i) for i in range(2)), key=lambda p: p.answer["row"]["start"])
        return collector.collect(
            problems,
            num_samples=GROUP,
            sampling=SamplingParams(max_tokens=MAX_LENGTH),
            seed_parts=(1, "test"),
        )


def make_trainer(policy: Policy, folder: Path, script: Script) -> Any:
    from datasets import Dataset

    model = copy.deepcopy(policy.lm)
    model.set_attn_implementation("sdpa")
    args = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(TURNS),
        num_generations=GROUP,
        max_completion_length=MAX_LENGTH,
        max_tool_calling_iterations=ITERATIONS,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "?"}]] * len(TURNS)}),
        processing_class=policy.tokenizer,
        environment_factory=counter.Counter,
    )
    trainer.current_gradient_accumulation_steps = 1

    def generate(prompts, *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]]]:
        is_first = len(prompts) == len(TURNS)
        said = [
            script.say(n if is_first else script.episode_of(tuple(prompt)), tuple(prompt))
            for n, prompt in enumerate(prompts)
        ]
        return [list(ids) for ids, _, _ in said], [list(logprobs) for _, logprobs, _ in said]

    trainer._generate_single_turn = generate
    return trainer


def rows_of(inputs: dict[str, torch.Tensor], name: str, mask: str) -> list[list]:
    return [row[m.bool()].tolist() for row, m in zip(inputs[name], inputs[mask], strict=True)]


def test_tokens_and_masks_are_those_of_trl(setting):
    rollouts = [rollout for group in setting.groups for rollout in group.rollouts]
    assert [len(rollout.turns) for rollout in rollouts] == [len(turns) for turns in TURNS]
    inputs = setting.inputs
    tokenizer = setting.policy.tokenizer
    for row, rollout in zip(rows_of(inputs, "prompt_ids", "prompt_mask"), rollouts, strict=True):
        assert tokenizer.decode(row) == tokenizer.decode(rollout.prompt_ids)
        assert row == [*rollout.prompt_ids]
    ids, mask = [], []
    for rollout in rollouts:
        turns = [(turn.completion.token_ids, turn.observation_ids) for turn in rollout.turns]
        ids.append([token for said, seen in turns for token in (*said, *seen)])
        mask.append([value for said, seen in turns for value in [1] * len(said) + [0] * len(seen)])
    assert rows_of(inputs, "completion_ids", "completion_mask") == ids
    assert rows_of(inputs, "tool_mask", "completion_mask") == mask
    assert any(0 in row for row in mask)


def test_rewards_and_advantages_are_those_of_trl(setting):
    rewards = [rollout.score.reward for group in setting.groups for rollout in group.rollouts]
    assert rewards == [1, 1, 0, 0, 1, 0]
    batches = pack(make_samples(setting.groups, setting.config), 1 << 20)
    builder = ExperienceBuilder(setting.policy, None, None, setting.config)
    [[experience]] = builder.build([batches], num_generations=GROUP, beta=0.0)
    batch = experience.batch
    for number, index in enumerate(batch.batch_index.tolist()):
        own = experience.advantages[batch.sequence_ids == number]
        expected = setting.inputs["advantages"][index].item()
        assert own.tolist() == pytest.approx([expected] * len(own), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"mask": True, "beta": 0.1}], ids=["plain", "masked with KL"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo"])
def test_the_loss_is_that_of_trl(setting, loss_type, changes):
    settings = {"loss_type": loss_type, **changes}
    is_masked = settings.pop("mask", False)
    inputs = dict(setting.inputs)
    inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
    inputs["ref_per_token_logps"] = reference_of(inputs["old_per_token_logps"], inputs["completion_ids"])
    samples = [
        replace(
            sample,
            rollout=replace(sample.rollout, score=replace(sample.rollout.score, reward=advantage)),
            keep=not (is_masked and sample.rollout.completion.finish is Finish.LENGTH),
        )
        for sample, advantage in zip(
            make_samples(setting.groups, setting.config), inputs["advantages"].tolist(), strict=True
        )
    ]
    kept = torch.tensor([[int(sample.keep)] for sample in samples])
    assert bool(kept.all()) != is_masked
    inputs["completion_mask"] = inputs["completion_mask"] * kept
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    their_loss, their_gradient = theirs(setting.trainer, inputs, settings)
    our_loss, our_gradient = ours(setting.policy, samples, settings, MAX_LENGTH)
    assert our_loss == pytest.approx(their_loss, abs=1e-5, rel=1e-5)
    assert relative_difference(our_gradient, their_gradient) < 1e-4
