"""TRL's `rollout_func` on our engines: the user's function unchanged, tokens, masks and logprobs right."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.rollout import trl_rollout
from whetstone.config import build
from whetstone.engines.base import SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy, load_policy
from whetstone.rollout.collector import Collector
from whetstone.rollout.rollout_func import RolloutFunction
from whetstone.tasks.registry import make_task
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import Group
from whetstone.update.packing import make_samples, pack

FILE = Path(trl_rollout.__file__)
MAX_TOKENS = 8
CONFIG = build(
    {
        "model_name_or_path": "pebble",
        "device": "cpu",
        "datasets": {"chain_sum": {}},
        "eval_num_samples": 0,
        "reward_funcs": [f"{FILE}:place_reward"],
        "reward_workers": 1,
        "max_completion_length": MAX_TOKENS,
    }
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(CONFIG.model, None, torch.device("cpu"))


@pytest.fixture(scope="module")
def scorer():
    with Scorer(CONFIG) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def problems():
    task = make_task(CONFIG, "chain_sum", CONFIG.tasks.datasets["chain_sum"], "train")
    return [task.problem(index) for index in range(2)]


def collect(policy, scorer, problems, name: str, temperature: float = 1.0) -> list[Group]:
    function = RolloutFunction(
        f"{FILE}:{name}",
        CONFIG,
        tokenizer=policy.tokenizer,
        stop_token_ids=policy.stop_token_ids,
        vocabulary_size=106,
        accelerator=SimpleNamespace(process_index=0, num_processes=1, is_main_process=True),
    )
    collector = Collector(
        NativeEngine(policy, 8),
        scorer,
        Chat(policy.tokenizer, CONFIG.model),
        max_prompt_length=None,
        max_length=policy.max_length,
        rollout_func=function,
    )
    return collector.collect(
        problems,
        num_samples=2,
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature),
        seed_parts=(1, "rollout", 7),
    )


def test_tokens_masks_and_logprobs_are_those_of_the_function(policy, scorer, problems):
    groups = collect(policy, scorer, problems, "two_turns")
    chat = Chat(policy.tokenizer, CONFIG.model)
    hint = tuple(policy.tokenizer(trl_rollout.HINT, add_special_tokens=False)["input_ids"])
    for number, group in enumerate(groups):
        for sample, rollout in enumerate(group.rollouts):
            assert rollout.prompt_ids == chat.encode(group.problem)
            assert [turn.observation_ids for turn in rollout.turns] == [hint, ()]
            assert rollout.score.reward == 2 * number + sample  # its extra field, in the reward function
    [batch] = pack(make_samples(groups, CONFIG), 1 << 20)
    with torch.no_grad():
        logprobs = policy.logprobs(batch, 1.0)
    assert (logprobs - batch.sampler_logprobs).abs().max() < 1e-4
    again = collect(policy, scorer, problems, "two_turns")
    turns = [[[r.turns for r in g.rollouts] for g in run] for run in (groups, again)]
    assert turns[0] == turns[1]
    first, second = groups[0].rollouts
    assert first.completion.token_ids != second.completion.token_ids  # each sample has its own seed


def test_the_same_function_under_trl_gives_the_same_tokens(policy, scorer, problems, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    groups = collect(policy, scorer, problems, "two_turns", temperature=0.0)
    prompts = [[dict(m) for m in problem.messages] for problem in problems for _ in range(2)]
    model = copy.deepcopy(policy.lm)
    model.set_attn_implementation("sdpa")
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=MAX_TOKENS,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=policy.tokenizer,
        rollout_func=trl_rollout.two_turns,
    )
    trainer.generation_config.do_sample = False
    prompt_ids, completion_ids, mask, *_ = trainer._generate(prompts)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [[*rollout.prompt_ids] for rollout in rollouts] == prompt_ids
    for rollout, ids, own in zip(rollouts, completion_ids, mask, strict=True):
        turns = [(turn.completion.token_ids, turn.observation_ids) for turn in rollout.turns]
        assert [token for said, seen in turns for token in (*said, *seen)] == ids
        assert [value for said, seen in turns for value in [1] * len(said) + [0] * len(seen)] == own


def test_a_function_of_one_turn_is_an_ordinary_rollout(policy, problems):
    config = CONFIG.model_copy(
        update={"tasks": CONFIG.tasks.model_copy(update={"reward_funcs": ["accuracy"]})}
    )
    with Scorer(config) as scorer:
        groups = collect(policy, scorer, problems, "by_vllm")
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert len(rollout.turns) == 1 and rollout.episode is None
        assert rollout.text == policy.tokenizer.decode(rollout.completion.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_logprobs", "a logprob for each token"),
        ("too_few", "4 entries of prompt_ids"),
        ("no_ids", "token ids"),
        ("strange_ids", "token ids"),
        ("missing", "prompt_ids, completion_ids, logprobs"),
        ("raises", "my server"),
        ("other_trainer", "trainer.llm"),
        ("all_masked", "env_mask"),
    ],
)
def test_what_can_not_be_used_is_one_sentence(policy, scorer, problems, name, sentence):
    with pytest.raises(UserError, match=sentence):
        collect(policy, scorer, problems, name)
    scorer.discard()
