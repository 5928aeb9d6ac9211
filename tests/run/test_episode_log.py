"""What is written of episodes: turns with calls, rewards and times, and the tokens that were observed."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.environments import counter
from whetstone.config.environments import EnvironmentsConfig
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.environments.pool import EpisodePool
from whetstone.rollout.episodes import EpisodeStream
from whetstone.run.completions import completion_row
from whetstone.run.token_log import pack_tokens
from whetstone.types import Completion, Finish, Group, Message, Problem, Rollout, Score
from whetstone.watch.tokens import tokens

COUNTER = f"{Path(counter.__file__)}:Counter"
TURNS = (
    '<tool_call>{"name": "add", "arguments": {"number": 7}}</tool_call>',
    "<tool_call>{}</tool_call>",
    "Done.",
)


class Characters:
    """A token is a character."""

    call_hint = ""

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def turn(self, prompt: Sequence[int], token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return self.decode(token_ids)

    def encode_observation(self, messages: Sequence[Message], max_tokens: int) -> tuple[int, ...]:
        return tuple(ord(c) for message in messages for c in message["content"])[:max_tokens]

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def completion(text: str) -> Completion:
    return Completion(
        token_ids=tuple(map(ord, text)),
        logprobs=tuple(-0.5 for _ in text),
        finish=Finish.STOP,
        policy_version=0,
    )


@pytest.fixture(scope="module")
def group() -> Group:
    """An episode of a real environment, by a policy that says TURNS."""
    messages = ({"role": "user", "content": "The counter is at 3. Bring it to 10."},)
    answer = {"settings": {}, "seed": 1, "row": {"start": 3}}
    problem = Problem(
        id="counter/train/0",
        task="counter",
        messages=messages,
        answer=answer,
        environment=COUNTER,
        tools=({"type": "function", "function": {"name": "add"}},),
    )
    with EpisodePool([COUNTER], timeout_s=60.0, memory_mb=512) as pool:
        stream = EpisodeStream(
            [problem],
            [(1, 2)],
            num_samples=1,
            sampling=SamplingParams(max_tokens=1000, temperature=1.0),
            seed_parts=(1,),
            pool=pool,
            codec=Characters(),
            config=EnvironmentsConfig(max_turns=8),
            max_length=None,
            is_cancelled=lambda: False,
        )
        requests: list[Request] = []
        sampled = []
        for number, text in enumerate(TURNS):
            sampled += stream.accept(GenerationOutput(request=number, sample=0, completion=completion(text)))
            requests += stream.take(wait=True)
        [done] = [*sampled, *stream.drain()]
    # The second prompt: the first one, the turn and the tool's answer.
    assert requests[0].prompt_ids == (1, 2, *map(ord, TURNS[0] + "10"))
    score = Score(reward=1.0, parts={"correct": 1.0}, answer=None)
    rollout = Rollout(prompt_ids=(1, 2), turns=done.turns, text=done.text, score=score, episode=done.episode)
    return Group(problem=problem, rollouts=(rollout,))


def test_turns_have_their_calls_answers_and_times(group: Group, tmp_path: Path) -> None:
    row = json.loads(json.dumps(completion_row(3, group, 0)))
    assert [message["role"] for message in row["turns"]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row["turns"][0]["tool_calls"] == [{"name": "add", "arguments": {"number": 7}}]
    assert row["turns"][2]["tool_calls"] == [{"error": "the tool call has no name"}]
    assert "tool_calls" not in row["turns"][4] and row["turns"][1]["content"] == "10"
    assert len(row["turn_rewards"]) == len(row["turn_seconds"]) == 3
    assert all(0 <= seconds < 60 for seconds in row["turn_seconds"])  # to a tenth of a millisecond
    assert sum(row["turn_seconds"]) <= row["environment_s"]  # which has the first answer and the reward, too
    # The tokens, as the page reads them: observations between the turns, without numbers.
    (tmp_path / "completions").mkdir()
    content = pack_tokens(3, [group], [0], {}, Characters())
    (tmp_path / "completions" / "tokens_3.npz").write_bytes(content)
    with np.load(io.BytesIO(content)) as file:
        description = json.loads(file["description"].tobytes())
        assert "".join(map(chr, file["observation_ids"])) == "10Error: the tool call has no name."
        assert "".join(map(chr, file["token_ids"])) == "".join(TURNS)
    lengths = [[len(TURNS[0]), 2], [len(TURNS[1]), 33], [len(TURNS[2]), 0]]
    assert description["completions"][0]["turn_tokens"] == lengths
    document = tokens(tmp_path, 3)
    assert document is not None
    [part] = document["parts"]
    said = TURNS[0] + "10" + TURNS[1] + "Error: the tool call has no name." + TURNS[2]
    assert "".join(document["texts"][str(token)] for token in part["ids"]) == said
    observed = [x is None for x in part["numbers"]["sampler_logprob"]]
    expected = [flag for said, seen in lengths for flag in [False] * said + [True] * seen]
    assert observed == expected and part["turns"] == lengths and len(part["rules"]) == len(said)
    assert "turn_tokens" not in part["row"]


@pytest.mark.parametrize("lengths", [[[1, 1]], [[1000, 5], [3, 0]], [["x", 0]], [[-1, 2]], 7])
def test_a_broken_file_is_no_document(group: Group, tmp_path: Path, lengths: object) -> None:
    (tmp_path / "completions").mkdir()
    content = pack_tokens(3, [group], [0], {}, Characters())
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    description = json.loads(arrays["description"].tobytes())
    description["completions"][0]["turn_tokens"] = lengths
    arrays["description"] = np.frombuffer(json.dumps(description).encode(), dtype=np.uint8)
    np.savez(tmp_path / "completions" / "tokens_3.npz", **arrays)
    assert tokens(tmp_path, 3) is None
