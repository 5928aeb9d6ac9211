"""TRL's `rollout_func` on our engines: the user's function unchanged, tokens, masks and logprobs right."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.corpora.model_folders import PEBBLE
from tests.rollout import trl_rollout
from tests.support.protocol_server import ModelServer
from whetstone.config import build
from whetstone.engines.base import Engine, Request, SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.engines.native import NativeEngine
from whetstone.engines.servers.pool import ServerHandle, ServerPool
from whetstone.engines.servers.settings import max_model_length
from whetstone.engines.servers.sglang import SGLangServer
from whetstone.engines.servers.vllm.server import VLLMServer
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy, load_policy
from whetstone.rollout.collector import Collector
from whetstone.rollout.rollout_func import RolloutFunction
from whetstone.tasks.registry import make_task, with_room_for_turns
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


@contextlib.contextmanager
def engine_of(policy: Policy, kind: str) -> Iterator[Engine]:
    """An engine by name; servers are ours (tests/support/protocol_server.py), over real HTTP."""
    if kind == "native":
        yield NativeEngine(policy, 8)
    elif kind == "hf":
        yield HFEngine(policy, 16, None)
    else:
        server = ModelServer(kind, PEBBLE)
        settings = {"stops": policy.stop_token_ids, "max_tokens": MAX_TOKENS, "weight_transfer": "auto"}
        settings |= {"group_port": None, "request_timeout_s": 20.0, "is_shared": False}
        client = SGLangServer if kind == "sglang" else VLLMServer
        handle = ServerHandle(server=client(server.url, **settings))
        pool = ServerPool([handle], policy, max_in_flight=4, timeout_s=10.0, weight_dir=None)
        pool.update_weights(0)
        yield pool
        pool.close()
        server.kill()


def collect(
    policy, scorer, problems, name: str, temperature: float = 1.0, engine: Engine | None = None
) -> list[Group]:
    function = RolloutFunction(
        f"{FILE}:{name}",
        CONFIG,
        tokenizer=policy.tokenizer,
        stop_token_ids=policy.stop_token_ids,
        vocabulary_size=106,
        accelerator=SimpleNamespace(process_index=0, num_processes=1, is_main_process=True),
    )
    collector = Collector(
        engine or NativeEngine(policy, 8),
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


@pytest.mark.parametrize("kind", ["native", "hf", "vllm", "sglang"])
def test_tokens_masks_and_logprobs_are_those_of_the_function(policy, scorer, problems, kind):
    with engine_of(policy, kind) as engine:
        groups, again = (collect(policy, scorer, problems, "two_turns", engine=engine) for _ in range(2))
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
    turns = [[[r.turns for r in g.rollouts] for g in run] for run in (groups, again)]
    assert turns[0] == turns[1]
    first, second = groups[0].rollouts
    assert first.completion.token_ids != second.completion.token_ids  # each sample has its own seed


def test_equal_prompts_are_one_request(policy, scorer, problems):
    """The samples of a problem begin alike; each keeps its own seed."""
    engine = NativeEngine(policy, 8)
    requests = []
    generate = engine.generate
    engine.generate = lambda *args: requests.append(args[0]) or generate(*args)  # type: ignore[method-assign]
    groups = collect(policy, scorer, problems, "two_turns", engine=engine)
    first, second = requests
    assert [len(request.seeds) for request in first] == [2, 2]
    assert len({seed for request in (*first, *second) for seed in request.seeds}) == 8
    said = [rollout.turns[0].completion.token_ids for group in groups for rollout in group.rollouts]
    alone = [Request(prompt_ids=r.prompt_ids, seeds=(seed,)) for r in first for seed in r.seeds]
    outputs = {o.request: o.completion for o in generate(alone, SamplingParams(max_tokens=MAX_TOKENS))}
    assert [outputs[index].token_ids for index in range(4)] == said


def test_servers_take_longer_prompts_where_there_are_turns():
    keys = {"datasets": {"chain_sum": {}}, "max_prompt_length": 100, "max_completion_length": 50}
    lengths = [
        max_model_length(with_room_for_turns(build({**keys, **own})))
        for own in (
            {},
            {"rollout_func": f"{FILE}:two_turns"},
            {"agent": f"{FILE}:two_turns"},
            {"tools": ["calculator"]},
            {"datasets": {"guess_number": {}}},
            {"tools": ["calculator"], "server_max_model_length": 400},
        )
    ]
    assert lengths == [150, None, None, None, None, 400]


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
