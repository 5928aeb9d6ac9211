"""Rollouts by agents with OpenAI's own client: exact tokens, right logprobs, repeatable; bad agents."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.agents import agents
from tests.serving.test_tools import CALL, TEMPLATE, TOOLS, teach
from tests.support.conversations import all_ids, check_logprobs, check_tokens, rollouts_of
from tests.support.http_fuzz import bombard
from tests.support.waiting import wait_until
from whetstone.config import build
from whetstone.engines.base import Engine, SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy, load_policy
from whetstone.rollout.agents.stream import AgentSettings
from whetstone.rollout.collector import Collector
from whetstone.rollout.metrics import rollout_metrics
from whetstone.run.agents import make_agents
from whetstone.tasks.registry import make_task
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import Finish, Group
from whetstone.update.packing import make_samples

FILE = Path(agents.__file__)
TASK = "chain_sum"
CONFIG = build(
    {
        "model_name_or_path": "pebble",
        "eval_num_samples": 0,
        "reward_funcs": ["accuracy"],
        "datasets": {TASK: {"config": {"min_terms": 2, "max_terms": 2, "max_digits": 2}}},
        "agent": f"{FILE}:any_of",
        "agent_max_length": 512,
        "environment_timeout_s": 20,
        "reward_workers": 1,
    }
)


@dataclass(frozen=True)
class Setting:
    policy: Policy
    scorer: Scorer
    settings: AgentSettings
    chat: Chat

    def collect(
        self,
        name: str | Callable[[int], str],
        *,
        engine: Engine | None = None,
        max_tokens: int = 96,
        num_problems: int = 2,
        num_samples: int = 3,
        temperature: float = 1.0,
        row: dict[str, Any] | None = None,
        **keys: Any,
    ) -> list[Group]:
        """The rollouts of an agent of agents.py; `name` may depend on the problem's index."""
        task = make_task(CONFIG, TASK, CONFIG.tasks.datasets[TASK], "train")
        problems = [task.problem(index) for index in range(num_problems)]
        names = {p.id: name if isinstance(name, str) else name(i) for i, p in enumerate(problems)}
        own = self.settings.row
        settings = replace(
            self.settings,
            config=self.settings.config.model_copy(update=keys),
            row=lambda problem: {**own(problem), "agent": names[problem.id], **(row or {})},
        )
        collector = Collector(
            engine or NativeEngine(self.policy, 8),
            self.scorer,
            self.chat,
            max_prompt_length=None,
            max_length=self.policy.max_length,
            agents=settings,
        )
        return collector.collect(
            problems,
            num_samples=num_samples,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
            seed_parts=(1, "test"),
        )


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    policy = load_policy(CONFIG.model, None, torch.device("cpu"))
    chat = Chat(policy.tokenizer, CONFIG.model)
    with contextlib.ExitStack() as stack:
        settings = make_agents(CONFIG, policy, chat, stack)
        assert settings is not None
        yield Setting(policy, stack.enter_context(Scorer(CONFIG)), settings, chat)


def test_tokens_equal_conversation_and_logprobs_equal_trainer(setting: Setting) -> None:
    groups = setting.collect("twice")
    check_tokens(setting.policy, groups)
    assert sum(len(rollout.turns) == 2 for rollout in rollouts_of(groups)) >= 4
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.episode is not None and rollout.episode.error is None
            if rollout.completion.finish is Finish.LENGTH:
                continue
            assert rollout.episode.finish is Finish.STOP and len(rollout.episode.seconds) == 2
            assert rollout.text == rollout.episode.messages[-1]["content"]
            assert rollout.score.reward == float(rollout.score.answer == group.problem.answer["answer"])
    check_logprobs(setting.policy, groups, CONFIG)
    metrics = rollout_metrics(groups)
    assert metrics["episodes/mean_turns"] > 1.5 and metrics["episodes/failed_ratio"] == 0


@pytest.mark.slow
def test_rollouts_do_not_depend_on_slots_or_client(setting: Setting) -> None:
    """A group begins alike, and an agent that streams gets what one that waits gets."""
    runs = [setting.collect("twice", engine=NativeEngine(setting.policy, slots)) for slots in (8, 3)]
    streamed = setting.collect("streams", row={"more": {"model": "policy", "seed": 0}})
    first, *others = ([all_ids(rollout) for rollout in rollouts_of(groups)] for groups in (*runs, streamed))
    assert all(other == first for other in others)
    assert len(set(map(tuple, first))) > 3


CHAT = {
    "messages": [{"role": "user", "content": "x"}], "model": "any", "temperature": 1e-40, "max_tokens": 3,
    "n": 1, "stream": True, "stop": ["x"], "tools": [], "logprobs": True, "top_p": 0.5, "top_k": -1,
}  # fmt: skip
TOKENS = {"token_ids": [3], "sampling_params": {"temperature": 1.0, "max_tokens": 2}}
STRANGERS = [
    *(("POST", f"/sessions/{name}/v1/chat/completions", CHAT) for name in ("x" * 24, "", "..", "%00")),
    ("POST", "/sessions/0/inference/v1/generate", TOKENS),
    ("GET", "/sessions/0/v1/models", None),
    ("GET", "/v1/models", None),
]


def test_generated_requests_change_no_rollout(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """By strangers while agents run, and by the agents themselves, in their own sessions."""
    alone = [all_ids(rollout) for rollout in rollouts_of(setting.collect("twice", num_problems=1))]
    endpoint = setting.settings.endpoint
    host, port = endpoint.server_address[:2]
    with ThreadPoolExecutor(1) as pool:
        strangers = pool.submit(bombard, (str(host), int(port)), 300, 5, STRANGERS)
        rollouts = [rollouts_of(setting.collect(name, num_problems=1)) for name in ("twice", "besieged")]
        statuses = strangers.result()
    assert [[all_ids(rollout) for rollout in own] for own in rollouts] == [alone, alone]
    assert {rollout.episode and rollout.episode.error for own in rollouts for rollout in own} == {None}
    assert set(statuses) <= {None, 400, 403, 404, 405, 411, 414, 431, 501, 505} and statuses[404] > 100
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
    wait_until(lambda: not endpoint._connections)
    assert endpoint.num_bytes == 0


def test_what_an_agent_returns_is_scored(setting: Setting) -> None:
    first, second = setting.collect("streams", row={"more": {"model": "policy", "seed": 0}})
    assert [rollout.score.reward for rollout in first.rollouts] == [1.0] * 3
    assert first.rollouts[0].episode is not None
    assert first.rollouts[0].episode.messages[-1]["content"] == first.rollouts[0].text
    assert all(rollout.turns[-1].completion.token_ids for rollout in second.rollouts)


@pytest.mark.slow
def test_turns_cut_by_an_agent_are_closed_as_by_the_template(setting: Setting) -> None:
    groups = setting.collect("stops")
    end = setting.chat.close_turn()
    for rollout in rollouts_of(groups):
        assert rollout.episode is not None and rollout.episode.error is None
        first, second, third = rollout.turns
        assert ">" in setting.chat.decode(first.completion.token_ids[-1:])
        assert first.observation_ids[: len(end)] == end and len(second.completion.token_ids) == 3
        assert len(third.completion.token_ids) <= 2 and rollout.episode.finish is Finish.STOP
        text = setting.policy.tokenizer.decode(all_ids(rollout))
        assert text.count("<|end|>") == 6 - (third.completion.finish is Finish.LENGTH)
    check_logprobs(setting.policy, groups, CONFIG)


@pytest.mark.slow
def test_tokens_in_tokens_out(setting: Setting) -> None:
    suffix = setting.chat.encode_observation([agents.AGAIN], 100)
    (stop,) = setting.chat.close_turn()
    groups = setting.collect("tokens", row={"suffix": suffix, "stop_id": stop})
    for rollout in rollouts_of(groups):
        assert rollout.episode is not None and rollout.episode.error is None
        assert rollout.turns[0].observation_ids == suffix
    check_logprobs(setting.policy, groups, CONFIG)


def test_a_rewritten_history_is_a_segment_of_its_own(setting: Setting) -> None:
    """With the tokens that the policy saw; what follows in it continues them."""
    groups = setting.collect("forgets")
    tokenizer = setting.policy.tokenizer
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.episode is not None and rollout.episode.error is None
            first, second, third = rollout.branches
            start = [*group.problem.messages, agents.SHORT, agents.AGAIN]
            context = tokenizer.apply_chat_template(start, tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(rollout.turns[1].context_ids) == context
            assert first.turns == rollout.turns[:1] and second.turns == rollout.turns[1:3]
            said = tokenizer.decode(second.turns[0].completion.token_ids, skip_special_tokens=True)
            following = [*start, {"role": "assistant", "content": said}, agents.AGAIN]
            context = tokenizer.apply_chat_template(following, tokenize=False, add_generation_prompt=True)
            ids = rollout.turns[1].context_ids + second.own_ids[len(second.context_ids) :]
            assert tokenizer.decode(ids[: -len(second.turns[1].completion.token_ids)]) == context
            assert third.parent == 1 and third.num_shared >= len(rollout.turns[1].context_ids)
            marks = [message.get("segment", 1) for message in rollout.episode.messages]
            assert marks == [1, 2, 2, 2, 2, 2, 3, 3, 3]
            assert rollout.text == rollout.episode.messages[-1]["content"]
    check_logprobs(setting.policy, groups, CONFIG)
    assert rollout_metrics(groups)["episodes/mean_segments"] == 3


def test_several_conversations_and_a_system_message_that_changes(setting: Setting) -> None:
    suffix = setting.chat.encode_observation([agents.AGAIN], 100)
    names = ("edits_system", "delegates", "sends_tokens_anew")
    row = {"suffix": suffix, "stop_id": setting.chat.close_turn()[0]}
    groups = setting.collect(lambda index: names[index], num_problems=3, row=row)
    for rollout in rollouts_of(groups):
        assert rollout.episode is not None and rollout.episode.error is None
        assert len(rollout.turns) == len(rollout.branches) == 3
    for rollout in groups[0].rollouts:
        assert all(branch.num_shared < len(rollout.prompt_ids) for branch in rollout.branches)
    for rollout in (*groups[1].rollouts, *groups[2].rollouts):
        first, _, last = rollout.branches
        whole = rollout.prompt_ids + first.own_ids  # sampled tokens that come again are not tokenized again
        assert last.parent == 0 and last.num_shared == len(whole)
        assert rollout.turns[2].context_ids[: len(whole)] == whole
    for rollout in groups[2].rollouts:
        assert rollout.turns[1].context_ids == (*suffix, 9, 11)
        assert rollout.branches[2].context_ids == ()
    check_logprobs(setting.policy, groups, CONFIG)


def test_limits_end_a_session_with_their_reason(setting: Setting) -> None:
    (group,) = setting.collect("endless", num_problems=1, max_turns=3)
    for rollout in group.rollouts:
        assert len(rollout.turns) == 3 and rollout.completion.finish is Finish.MAX_TURNS
        assert rollout.episode is not None and rollout.episode.error is None
    (group,) = setting.collect("gives_up", num_problems=1, max_tokens=5)
    for rollout in group.rollouts:
        assert rollout.text == "done"
        assert len(rollout.completion.token_ids) <= 5 and rollout.completion.finish is Finish.LENGTH
    (group,) = setting.collect("long", num_problems=1)
    assert {rollout.text for rollout in group.rollouts} == {"done"}
    assert {rollout.completion.finish for rollout in group.rollouts} == {Finish.STOP}
    (group,) = setting.collect("too_long", num_problems=1)
    assert {rollout.completion.finish for rollout in group.rollouts} == {Finish.CONTEXT_OVERFLOW}


def test_bad_agents_cost_their_own_rollouts_and_are_named(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them at once, and a good one among them."""
    monkeypatch.setattr(setting.settings.pool, "timeout_s", 4.0)
    names = ["twice", *agents.BAD]
    groups = setting.collect(lambda index: names[index], num_problems=len(names), num_samples=1)
    for name, group in zip(names, groups, strict=True):
        for rollout in group.rollouts:
            assert rollout.episode is not None
            error, finish = rollout.episode.error, rollout.episode.finish
            if name == "twice":
                assert error is None
                continue
            assert error is not None and agents.BAD[name] in error, name
            assert finish is (Finish.TIMEOUT if "no request" in error else Finish.TOOL_ERROR)
            assert rollout.score.reward == 0.0 and rollout.text == ""
    failed = rollout_metrics(groups)["episodes/failed_ratio"]
    assert failed == len(agents.BAD) / len(names)
    assert f"{len(agents.BAD)} of {len(names)} agents failed" in caplog.text
    samples = make_samples(groups, CONFIG)
    silent = [s for s in samples if s.rollout.episode is not None and s.rollout.episode.is_silent]
    assert len(silent) >= 6 and not any(sample.keep for sample in silent)
    assert all(sample.rollout.num_tokens > 1 for sample in silent)


@pytest.mark.slow
def test_a_client_that_leaves_is_forgotten(setting: Setting) -> None:
    for number, group in enumerate(setting.collect(lambda index: ("leaves", "asks_at_once")[index])):
        for rollout in group.rollouts:
            assert rollout.episode is not None and rollout.episode.error is None
            assert len(rollout.turns) == 1 + number
    for rollout in rollouts_of(setting.collect("returns_meanwhile")):
        assert rollout.episode is not None and rollout.episode.error is None
        assert rollout.text == "done" and 1 <= len(rollout.turns) <= 2


@pytest.mark.slow
def test_an_engine_without_a_stream_works_in_rounds(setting: Setting) -> None:
    engines = (HFEngine(setting.policy, 16, None), NativeEngine(setting.policy, 8))
    greedy = [setting.collect("twice", engine=engine, temperature=0.0) for engine in engines]
    ours, theirs = ([all_ids(rollout) for rollout in rollouts_of(groups)] for groups in greedy)
    assert ours == theirs


@pytest.mark.slow
def test_a_loop_with_a_tool(setting: Setting) -> None:
    """The embedded model, taught to call it once; the call is not written again by the template."""
    policy = load_policy(CONFIG.model, None, torch.device("cpu"))
    policy.tokenizer.chat_template = TEMPLATE
    chat = Chat(policy.tokenizer, CONFIG.model)
    own = replace(setting, policy=policy, chat=chat)
    question = [{"role": "user", "content": "4 + 73"}]
    prompt = policy.tokenizer.apply_chat_template(
        question, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    call = f"<tool_call>\n{CALL}\n</tool_call><|end|>"
    result = "<|user|>77<|end|><|assistant|>"
    teach(policy, prompt, call, 30)
    row = {"messages": question, "tools": TOOLS}
    (group,) = own.collect("tools", row=row, num_problems=1, num_samples=1, temperature=0.0, max_turns=2)
    (rollout,) = group.rollouts
    assert rollout.episode is not None and rollout.episode.error is None
    assert rollout.episode.num_tool_calls >= 1
    said = policy.tokenizer.decode(rollout.turns[0].completion.token_ids)
    seen = policy.tokenizer.decode(rollout.turns[0].observation_ids)
    assert CALL in said and seen.endswith(result), seen
    asked, message, answered, *_ = rollout.episode.messages
    assert asked == question[0] and message["content"] == ""
    assert message["tool_calls"] == [{"name": "add", "arguments": {"a": 4, "b": 73}}]
    assert (answered["role"], answered["content"]) == ("tool", "77")


def test_what_is_refused(setting: Setting, tmp_path: Path) -> None:
    def refused(**keys: Any) -> str:
        config = build({"model_name_or_path": "pebble", "agent": f"{FILE}:any_of", **keys})
        with pytest.raises(UserError) as error, contextlib.ExitStack() as stack:
            make_agents(config, setting.policy, setting.chat, stack)
        return str(error.value)

    (tmp_path / "mine.py").write_text("def client(base_url): ...")
    assert "guess_number" in refused(datasets={"guess_number": {}})
    assert "calculator" in refused(tools=["calculator"])
    assert "apply_chat_template=true" in refused(apply_chat_template=False)
    assert "two arguments" in refused(agent=f"{tmp_path}/mine.py:client")
    assert "no 'nobody'" in refused(agent=f"{tmp_path}/mine.py:nobody")
