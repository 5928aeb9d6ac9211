"""Episodes of a batch: what the policy said goes to environments, what they answer becomes its next prompt.

Nothing waits for the slowest: the engine samples whatever is ready, and asks between its steps for what has
become ready since (`take`). Tokens are exact: what was sampled is never tokenized again, an observation is
appended to it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from whetstone import seeds
from whetstone.config.environments import EnvironmentsConfig
from whetstone.endpoint.choice import ChatCodec
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.environments.calls import block_calls, executed_calls, fenced_calls, parse_calls
from whetstone.environments.games.base import SOLVED
from whetstone.environments.pool import Answer
from whetstone.environments.toolbox import TOOLBOX
from whetstone.rollout.gathering import Gathering, TimedStream
from whetstone.types import Completion, Episode, Finish, Message, Problem, Turn

POLL_S = 0.5  # longest wait before a cancelled run is noticed


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A finished rollout without its score."""

    problem: int  # index in the batch
    sample: int
    turns: tuple[Turn, ...]
    text: str
    episode: Episode | None = None
    outcome: dict[str, Any] | None = None  # the environment's judgement; None: the task scores the text
    state: dict[str, Any] | None = None  # plain attributes of the environment, for reward functions
    prompt_ids: tuple[int, ...] | None = None  # of an agent or a `rollout_func`, which writes its own
    columns: dict[str, Any] | None = None  # extra fields of a `rollout_func`, for reward functions
    messages: tuple[Message, ...] | None = None  # what reward functions get as its completion

    @property
    def has_failed(self) -> bool:
        """Whether its environment or agent failed: it earns 0, whatever the policy said."""
        return self.episode is not None and self.episode.error is not None


@dataclass
class _Running:
    problem: int
    sample: int
    token_ids: tuple[int, ...]  # prompt and all turns so far
    sample_of: tuple[int, int] | None = None  # (request, sample) of its newest completion
    completions: list[Completion] = field(default_factory=list)
    observations: list[tuple[int, ...]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    final_reward: float | None = None
    correct: bool | None = None
    state: dict[str, Any] | None = None
    num_tool_turns: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    environment_s: float = 0.0
    error: str | None = None
    is_started: bool = False
    is_paid: bool = False  # the environment has named a reward
    is_reset: bool = False
    is_unsent: bool = False  # the policy spoke before the environment was ready
    finish: Finish | None = None  # known; the environment's last word is awaited

    @property
    def num_sampled(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


class Environments(Protocol):
    """The processes of episodes: `environments.pool.EpisodePool`."""

    @property
    def num_due(self) -> int: ...
    def start(
        self, number: int, environment: str, settings: Mapping[str, Any], seed: int, row: Mapping[str, Any], /
    ) -> None: ...
    def step(self, number: int, text: str, calls: Sequence[Mapping[str, Any]], /) -> None: ...
    def finish(self, number: int, /) -> None: ...
    def poll(self, timeout_s: float, /) -> list[Answer]: ...
    def end(self, number: int, /) -> None: ...
    def end_all(self) -> None: ...


class EpisodeStream(TimedStream):
    """The requests of a batch in which some problems have environments (`engines.base.RequestStream`)."""

    def __init__(
        self,
        problems: Sequence[Problem],
        prompts: Sequence[tuple[int, ...]],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        pool: Environments,
        codec: ChatCodec,
        config: EnvironmentsConfig,
        max_length: int | None,
        is_cancelled: Callable[[], bool],
        block_arguments: Mapping[str, str] | None = None,
    ):
        self.problems, self.num_samples, self.sampling = problems, num_samples, sampling
        self.seed_parts, self.pool, self.codec, self.config = seed_parts, pool, codec, config
        self.max_length, self.is_cancelled = max_length, is_cancelled
        self.block_arguments = block_arguments or {}  # of tools that are called by blocks of code
        self.num_sequences = len(problems) * num_samples
        longest = max(map(len, prompts)) + sampling.max_tokens
        most_turns = max(self._max_turns(problem) for problem in problems)
        longest += (most_turns - 1) * config.max_observation_length
        self.max_prompt_length = longest if max_length is None else min(longest, max_length)
        # Of requests: the problem, and the episode from its second turn on.
        self._owners: list[tuple[int, int | None]] = [(p, None) for p in range(len(problems))]
        self._running: dict[int, _Running] = {}  # by number of the episode
        self._finished: list[Sampled] = []
        self._ready = Gathering[Request]()
        self._ended: list[tuple[int, int]] = []  # last completions of episodes that have ended
        for p, problem in enumerate(problems):
            if problem.environment is None:
                continue
            for sample in range(num_samples):
                number = p * num_samples + sample
                self._running[number] = _Running(p, sample, prompts[p])
                if problem.environment != TOOLBOX:  # otherwise the first call starts it, if there is one
                    self._start(number)

    def _max_turns(self, problem: Problem) -> int:
        """Of episodes with tools, `max_tool_calling_iterations` is the limit where it is set."""
        iterations = self.config.max_tool_calling_iterations
        has_tools = problem.tools or problem.environment == TOOLBOX
        return self.config.max_turns if iterations is None or not has_tools else iterations + 1

    def _start(self, number: int) -> None:
        running = self._running[number]
        problem = self.problems[running.problem]
        assert problem.environment is not None
        running.is_started = True
        answer = {} if problem.environment == TOOLBOX else problem.answer
        settings, row = answer.get("settings", {}), answer.get("row", {})
        own = (*self.seed_parts, *problem.seed_parts, running.sample)  # of a toolbox, which has none
        self.pool.start(number, problem.environment, settings, answer.get("seed", seeds.seed(*own)), row)

    def accept(self, output: GenerationOutput) -> Iterator[Sampled]:
        """Take a completion; yields rollouts that have become complete."""
        p, number = self._owners[output.request]
        text = self.codec.decode(output.completion.token_ids)
        if self.problems[p].environment is None:
            turns = (Turn(completion=output.completion),)
            self._finished.append(Sampled(problem=p, sample=output.sample, turns=turns, text=text))
        else:
            self._said(p * self.num_samples + output.sample if number is None else number, output, text)
        yield from self.drain()

    def drain(self) -> Iterator[Sampled]:
        finished, self._finished = self._finished, []
        yield from finished

    def _take(self, *, wait: bool) -> list[Request]:
        if self.config.full_determinism:
            return self._take_round() if wait else []
        while True:
            for request in self._process(self.pool.poll(self._ready.pause_s(POLL_S if wait else 0.0))):
                self._ready.add(request)
            if requests := self._ready.take(expects_more=bool(self.pool.num_due)):
                return requests
            if not wait or (not self._ready and not self._running) or self.is_cancelled():
                return []

    def _take_round(self) -> list[Request]:
        """Who speaks again, once every environment has answered: which sequences are sampled together, and so
        the last bits of their logprobs, do not depend on time."""
        requests: list[Request] = []
        while not self.is_cancelled():
            answers = self.pool.poll(POLL_S)
            while self.pool.num_due and not self.is_cancelled():
                answers += self.pool.poll(POLL_S)
            if not answers:
                break
            requests += self._process(sorted(answers, key=lambda answer: answer.number))
        return requests

    def _process(self, answers: Iterable[Answer]) -> Iterator[Request]:
        """What follows from the answers, and the requests of those who speak again."""
        for answer in answers:
            if answer.number in self._running and (request := self._answered(answer)) is not None:
                yield request

    def cancelled(self) -> Sequence[tuple[int, int]]:
        ended, self._ended = self._ended, []
        return ended

    def _said(self, number: int, output: GenerationOutput, text: str) -> None:
        running = self._running.get(number)
        if running is None:  # its environment failed while the policy spoke
            return
        running.completions.append(output.completion)
        running.sample_of = output.request, output.sample
        running.token_ids += output.completion.token_ids
        running.messages.append({"role": "assistant", "content": text})
        if running.error is not None:
            self._end(number, running)
        elif output.completion.finish is Finish.LENGTH:
            self._ask_for_reward(number, running, Finish.LENGTH)
        elif running.is_reset or not running.is_started:
            self._send(number, running)
        else:
            running.is_unsent = True

    def _send(self, number: int, running: _Running) -> None:
        """What the policy said last to its environment, with the calls of tools in it."""
        problem = self.problems[running.problem]
        calls = self._calls(problem, running)
        if calls:
            running.messages[-1] = {**running.messages[-1], "tool_calls": calls}
            if running.num_tool_turns + 1 >= self._max_turns(problem):
                return self._ask_for_reward(number, running, Finish.MAX_TURNS)  # as in TRL: not executed
            running.num_tool_turns += 1
        if not running.is_started:
            if not calls:
                return self._ask_for_reward(number, running, Finish.STOP)
            running.is_unsent = True
            return self._start(number)
        self.pool.step(number, running.messages[-1]["content"], calls)

    def _calls(self, problem: Problem, running: _Running) -> list[dict[str, Any]]:
        """The calls of tools in what the policy said."""
        said = running.completions[-1].token_ids
        prompt = running.token_ids[: -len(said)]
        if problem.environment == TOOLBOX and self.block_arguments:
            return executed_calls(block_calls(self.codec.turn(prompt, said), self.block_arguments))
        if not problem.tools:
            return []
        text, tools = self.codec.turn(prompt, said, keep_special=True), problem.tools
        return executed_calls(parse_calls(text, tools) or fenced_calls(text, tools, self.codec.call_hint))

    def _answered(self, answer: Answer) -> Request | None:
        """Process an environment's answer; the policy's next request, where it speaks again."""
        running = self._running[answer.number]
        running.environment_s += answer.seconds
        if answer.error is not None:
            running.error = answer.error
            running.finish = Finish.TIMEOUT if answer.is_timeout else Finish.TOOL_ERROR
            if running.completions:  # otherwise its first turn is being sampled
                self._end(answer.number, running)
            return None
        if not running.is_reset:
            running.is_reset = True
            if not self._begins_alike(running, answer):
                return self._fail_reset(answer.number, running)
            if running.finish is not None:  # the policy was cut off meanwhile
                self.pool.finish(answer.number)
                return None
            if running.is_unsent:
                running.num_tool_turns = 0  # counted once
                self._send(answer.number, running)
            return None
        if running.finish is not None:
            if answer.reward is not None:
                running.final_reward = answer.reward
                running.is_paid = True
            running.correct = answer.correct if answer.correct is not None else running.correct
            running.state = answer.state
            self._end(answer.number, running)
            return None
        return self._next_turn(answer, running)

    def _begins_alike(self, running: _Running, answer: Answer) -> bool:
        """Whether the episode opens with what the policy was shown: `reset` ran for the prompt as well."""
        shown = str(self.problems[running.problem].messages[-1]["content"]).rstrip()
        newest = answer.observation[-1:]
        return all(m["role"] != "user" or shown.endswith(m["content"].strip()) for m in newest)

    def _fail_reset(self, number: int, running: _Running) -> None:
        running.error = "reset said something else than before with the same seed: it must depend on it only"
        running.finish = Finish.TOOL_ERROR
        if running.completions:
            self._end(number, running)

    def _next_turn(self, answer: Answer, running: _Running) -> Request | None:
        running.rewards.append(answer.reward or 0.0)
        running.seconds.append(answer.seconds)
        running.is_paid |= answer.reward is not None
        running.num_tool_calls += answer.num_tool_calls
        running.num_tool_errors += answer.num_tool_errors
        running.messages.extend(answer.observation)
        if answer.correct is not None:
            running.correct = answer.correct
        remaining = self.sampling.max_tokens - running.num_sampled
        if answer.done:
            return self._ask_for_reward(answer.number, running, Finish.STOP)
        if len(running.completions) >= self._max_turns(self.problems[running.problem]):
            return self._ask_for_reward(answer.number, running, Finish.MAX_TURNS)
        if remaining < 1:
            return self._ask_for_reward(answer.number, running, Finish.LENGTH)
        observation = self.codec.encode_observation(answer.observation, self.config.max_observation_length)
        observation = without_stop(running.token_ids, observation)
        prompt = running.token_ids + observation
        if self.max_length is not None:
            remaining = min(remaining, self.max_length - len(prompt))
        if remaining < 1:
            return self._ask_for_reward(answer.number, running, Finish.CONTEXT_OVERFLOW)
        running.observations.append(observation)
        running.token_ids = prompt
        self._owners.append((running.problem, answer.number))
        problem = self.problems[running.problem]
        seed = seeds.seed(*self.seed_parts, *problem.seed_parts, running.sample, len(running.completions))
        return Request(
            prompt_ids=prompt,
            seeds=(seed,),
            max_tokens=(remaining,),
            may_continue=True,
            continues=running.sample_of,
        )

    def _ask_for_reward(self, number: int, running: _Running, finish: Finish) -> None:
        running.finish = finish
        if running.is_reset:
            self.pool.finish(number)
        elif not running.is_started:  # it has no part in this episode
            self._end(number, running)

    def _end(self, number: int, running: _Running) -> None:
        self.pool.end(number)
        del self._running[number]
        if running.sample_of is not None:
            self._ended.append(running.sample_of)
        assert running.finish is not None
        said = [str(m["content"]) for m in running.messages if m["role"] == "assistant"]
        observations = [*running.observations, ()]
        episode = Episode(
            finish=running.finish,
            messages=tuple(running.messages),
            rewards=tuple(running.rewards),
            seconds=tuple(running.seconds),
            num_tool_calls=running.num_tool_calls,
            num_tool_errors=running.num_tool_errors,
            environment_s=running.environment_s,
            error=running.error,
        )
        turns = [
            Turn(completion=completion, observation_ids=observation)
            for completion, observation in zip(running.completions, observations, strict=True)
        ]
        by_task = self.problems[running.problem].scored_by_task
        self._finished.append(
            Sampled(
                problem=running.problem,
                sample=running.sample,
                turns=tuple(turns),
                text=said[-1] if by_task else "\n".join(said),
                episode=episode,
                outcome=None if by_task else {**_judgement(running), "last": said[-1]},
                state=running.state,
            )
        )


def without_stop(token_ids: tuple[int, ...], observation: tuple[int, ...]) -> tuple[int, ...]:
    """The observation without the token that the policy stopped at: GLM stops at what opens the next turn."""
    return observation[1:] if observation[:1] == token_ids[-1:] else observation


def _judgement(running: _Running) -> dict[str, Any]:
    """The environment's reward, None where it names none, and whether the episode was won."""
    reward = math.fsum(running.rewards) if running.final_reward is None else running.final_reward
    if not running.is_paid:
        return {"reward": None, "correct": running.correct}
    return {"reward": reward, "correct": reward >= SOLVED if running.correct is None else running.correct}
