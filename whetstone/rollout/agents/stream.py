"""The requests of agents as a stream of the engine: each is sampled when it comes, in the rollout's session.

Everything here runs in the thread that samples; connections hand over calls (`deliver`). The calls of one
session are sampled one after the other, so its turns have numbers, and seeds by these.
"""

import logging
import queue
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whetstone import seeds
from whetstone.config.environments import EnvironmentsConfig
from whetstone.endpoint.choice import ChatCodec, Codec
from whetstone.endpoint.protocol import ApiError
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.environments.agents import AgentPool
from whetstone.environments.pool import Answer
from whetstone.rollout.agents.calls import Call
from whetstone.rollout.agents.endpoint import AgentEndpoint, session_over
from whetstone.rollout.agents.session import Prompt, Session
from whetstone.rollout.episodes import Sampled
from whetstone.rollout.gathering import Gathering, TimedStream
from whetstone.terminal.text import escape_controls
from whetstone.types import Episode, Finish, Problem, Turn

POLL_S = 0.5  # longest wait before a cancelled run is noticed
MAX_WAITING = 64  # requests of one session
MAX_CHARACTERS_PER_TOKEN = 256  # of a request, on average: more is not encoded
logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What a collector needs for rollouts by an agent."""

    pool: AgentPool
    endpoint: AgentEndpoint
    config: EnvironmentsConfig
    codec: Codec
    row: Callable[[Problem], dict[str, Any]]  # what the agent is told of a problem


@dataclass
class _Running:
    problem: int
    sample: int
    session_id: str
    session: Session = field(default_factory=Session)
    waiting: deque[Call] = field(default_factory=deque)
    active: Call | None = None  # that is being sampled
    sample_of: tuple[int, int] | None = None  # (request, sample) of its newest completion, uncut
    limit: Finish | None = None  # why it gets no more answers
    since: float = field(default_factory=time.monotonic)  # when it had its last answer
    seconds: list[float] = field(default_factory=list)  # of the agent, before each turn
    error: str | None = None
    finish: Finish = Finish.STOP
    answer: str | None = None


@dataclass(frozen=True)
class _Owner:
    """Whose request it is; without a call, of an agent that has ended and never asked."""

    number: int
    running: _Running
    call: Call | None = None
    prompt: Prompt | None = None
    is_last: bool = False  # no more tokens are left behind it


class AgentStream(TimedStream):
    """The requests of a batch whose rollouts come from agents (`engines.base.RequestStream`)."""

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
        settings: AgentSettings,
        chat: ChatCodec,
        max_length: int | None,
        is_cancelled: Callable[[], bool],
    ):
        self.problems, self.sampling, self.seed_parts = problems, sampling, seed_parts
        self.settings, self.pool, self.chat, self.is_cancelled = settings, settings.pool, chat, is_cancelled
        self._longest = min(settings.config.agent_max_length, max_length or settings.config.agent_max_length)
        self.max_length: int | None = self._longest
        self.max_prompt_length = self._longest - 1
        self.num_sequences = len(problems) * num_samples
        self._running: dict[int, _Running] = {}  # by number of the agent
        self._sessions: dict[str, int] = {}
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._ready = Gathering[tuple[Request, _Owner]]()
        # By number of the request and of its sample; None: nobody wants it any more.
        self._owners: list[list[_Owner | None]] = []
        self._cancelled: list[tuple[int, int]] = []
        self._finished: list[Sampled] = []
        self._errors: Counter[str] = Counter()
        for p, problem in enumerate(problems):
            row = settings.row(problem)
            for sample in range(num_samples):
                self._start(p * num_samples + sample, p, sample, row)

    def _start(self, number: int, problem: int, sample: int, row: Mapping[str, Any]) -> None:
        running = _Running(problem, sample, secrets.token_hex(12))
        self._running[number], self._sessions[running.session_id] = running, number
        url = self.settings.endpoint.open(running.session_id, self.deliver, self.pool.wake)
        arguments = {"base_url": url, "problem": dict(row)}
        self.pool.start(number, self.pool.environment, {}, self._seed(running, 0) >> 32, arguments)

    def deliver(self, call: Call) -> None:
        """By a connection's thread: a request has come."""
        self._calls.put(call)
        self.pool.wake()

    def _take(self, *, wait: bool) -> list[Request]:
        while True:
            self._queue_calls()  # first: who has asked is not late, however long the last step took
            for answer in self.pool.poll(self._ready.pause_s(POLL_S if wait else 0.0)):
                if (running := self._running.get(answer.number)) is not None:
                    self._ended(answer, running)
            self._queue_calls()
            self._drop_abandoned()
            expects_more = any(running.active is None for running in self._running.values())
            if ready := self._ready.take(expects_more=expects_more):
                return self._requests(ready)
            if not wait or (not self._ready and not self._running) or self.is_cancelled():
                return []

    def _requests(self, ready: Sequence[tuple[Request, _Owner]]) -> list[Request]:
        """Those with the same prompt as one request, whose samples share its prefill."""
        groups: dict[tuple[int, ...], list[tuple[Request, _Owner]]] = {}
        for entry in ready:
            groups.setdefault(entry[0].prompt_ids, []).append(entry)
        for group in groups.values():
            self._owners.append([owner for _, owner in group])
        return [
            Request(
                prompt_ids=prompt_ids,
                seeds=tuple(seed for request, _ in group for seed in request.seeds),
                max_tokens=tuple(limit for request, _ in group for limit in request.max_tokens or ()),
                may_continue=any(request.may_continue for request, _ in group),
                continues=group[0][0].continues if len(group) == 1 else None,
            )
            for prompt_ids, group in groups.items()
        ]

    def cancelled(self) -> Sequence[tuple[int, int]]:
        samples, self._cancelled = self._cancelled, []
        return samples

    def accept(self, output: GenerationOutput) -> Iterator[Sampled]:
        """Take a completion; yields rollouts that have become complete."""
        owners = self._owners[output.request]
        owner, owners[output.sample] = owners[output.sample], None
        if owner is not None and owner.call is None:
            self._finish(owner.running, (Turn(completion=output.completion),), owner.prompt, is_silent=True)
        elif owner is not None and owner.running.active is owner.call:
            self._said(owner, output)
        yield from self.drain()

    def drain(self) -> Iterator[Sampled]:
        finished, self._finished = self._finished, []
        yield from finished

    def close(self) -> None:
        """End what is left, and say what failed."""
        for number, running in list(self._running.items()):
            self._leave(number, running)
        failed = sum(self._errors.values())
        if failed:
            reason, count = self._errors.most_common(1)[0]
            logger.warning(
                f"{failed} of {self.num_sequences} agents failed, {count} of them with: "
                f"{escape_controls(reason)}. Their rollouts earn 0."
            )

    def _queue_calls(self) -> None:
        while not self._calls.empty():
            self._queue(self._calls.get())

    def _queue(self, call: Call) -> None:
        number = self._sessions.get(call.session)
        if number is None or number not in self._running:
            return call.finish(session_over())
        running = self._running[number]
        if len(running.waiting) >= MAX_WAITING:
            return call.finish(ApiError(429, f"{MAX_WAITING} requests of this session wait: send fewer."))
        running.waiting.append(call)
        self._issue(number, running)

    def _issue(self, number: int, running: _Running) -> None:
        """Ask the engine for the next call of a session, if none is being sampled."""
        while running.active is None and running.waiting:
            call = running.waiting.popleft()
            if (reply := running.session.repeated(call)) is not None:
                call.finish(reply)
                continue
            try:
                request, owner = self._request(number, running, call)
            except ApiError as error:
                call.finish(error)
                continue
            running.active = call
            running.seconds.append(max(0.0, call.since - running.since))
            self.pool.hold(number)
            self._add(request, owner)

    def _add(self, request: Request, owner: _Owner) -> None:
        self._ready.add((request, owner))

    def _request(self, number: int, running: _Running, call: Call) -> tuple[Request, _Owner]:
        """A call as a request of the engine; `ApiError` where a limit or the conversation forbids it."""
        session, config = running.session, self.settings.config
        remaining = self.sampling.max_tokens - session.num_sampled
        if running.limit is Finish.LENGTH or remaining < 1:
            raise self._over(running, Finish.LENGTH, "max_completion_length", self.sampling.max_tokens)
        if len(session.turns) >= config.max_turns:
            raise self._over(running, Finish.MAX_TURNS, "max_turns", config.max_turns)
        characters = sum(len(str(message.get("content"))) for message in call.messages)
        if characters > self._longest * MAX_CHARACTERS_PER_TOKEN:
            raise self._too_long(running, f"{characters:,} characters")
        try:
            prompt = session.prompt(call, self.chat, self.settings.codec, self._longest)
        except ApiError:
            raise
        except Exception as error:  # a chat template is code, which got what the agent sent
            raise ApiError(400, f"The chat template can't write this: {error}.", param="messages") from None
        room = self._longest - len(prompt.token_ids)
        if room < 1:
            raise self._too_long(running, f"{len(prompt.token_ids):,} tokens")
        running.limit = None
        self._note_sampling(call)
        if running.sample_of is not None and not session.continues_last(prompt):
            self._cancelled.append(running.sample_of)  # its keys and values are of another history
            running.sample_of = None
        most = min(remaining, room)
        limit = most if call.max_tokens is None else min(most, call.max_tokens)
        seed = self._seed(running, len(session.turns))
        request = Request(
            prompt_ids=prompt.token_ids,
            seeds=(seed,),
            max_tokens=(limit,),
            may_continue=True,
            continues=running.sample_of,
        )
        return request, _Owner(number, running, call, prompt, is_last=limit == most)

    def _over(self, running: _Running, limit: Finish, key: str, value: int) -> ApiError:
        running.limit = limit
        return ApiError(400, f"The session is over: {key} is {value:,}.", code=key)

    def _too_long(self, running: _Running, size: str) -> ApiError:
        running.limit = Finish.CONTEXT_OVERFLOW
        return ApiError(
            400,
            f"This model's maximum context length is {self._longest:,} tokens, but the request has {size}.",
            param="messages",
            code="context_length_exceeded",
        )

    def _note_sampling(self, call: Call) -> None:
        """Trained tokens are sampled as the run says; an agent that asks for something else is told so."""
        own = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
        own |= {"top_k": float(self.sampling.top_k), "min_p": self.sampling.min_p}
        for name, value in call.sampling.items():
            if value != own[name]:
                self.settings.endpoint.warn_once(
                    name, f"The agent asks for {name}={value:g}; the run samples with its own {own[name]:g}."
                )

    def _seed(self, running: _Running, turn: int) -> int:
        """Of a turn; the first has the seed of a task without turns."""
        parts = (*self.seed_parts, *self.problems[running.problem].seed_parts, running.sample)
        return seeds.seed(*parts, turn) if turn else seeds.seed(*parts)

    def _said(self, owner: _Owner, output: GenerationOutput) -> None:
        running, number = owner.running, owner.number
        assert owner.call is not None and owner.prompt is not None
        running.active = None
        reply = running.session.record(owner.call, owner.prompt, output.completion, self.settings.codec)
        is_whole = len(reply.completion.token_ids) == len(output.completion.token_ids)
        running.sample_of = (output.request, output.sample) if is_whole else None
        if not is_whole:
            self._cancelled.append((output.request, output.sample))
        if reply.completion.finish is Finish.LENGTH and owner.is_last:
            running.limit = Finish.LENGTH
        running.since = time.monotonic()
        self.pool.release(number)
        owner.call.finish(reply)
        self._issue(number, running)

    def _drop_abandoned(self) -> None:
        """Calls whose client has closed the connection: not recorded, and the next one gets its chance."""
        for number, running in self._running.items():
            if running.active is None or not running.active.is_gone:
                continue
            self._cancel(running.active)
            running.active = None
            running.seconds.pop()
            self.pool.release(number)
            self._issue(number, running)

    def _cancel(self, call: Call) -> None:
        """Nobody wants the answer to this call any more."""
        for request, owners in enumerate(self._owners):
            for sample, owner in enumerate(owners):
                if owner is not None and owner.call is call:
                    owners[sample] = None
                    self._cancelled.append((request, sample))
        self._ready.remove(lambda entry: entry[1].call is call)

    def _ended(self, answer: Answer, running: _Running) -> None:
        """An agent has returned, failed or hung."""
        now = time.monotonic()
        if running.active is None:
            running.seconds.append(now - running.since)
        self._leave(answer.number, running)
        if answer.is_timeout:
            running.error = f"no request and no answer in {self.pool.timeout_s:g} s (environment_timeout_s)"
            running.finish = Finish.TIMEOUT
        elif running.limit is not None:  # which it may have raised at
            running.finish = running.limit
        elif answer.error is not None:
            running.error, running.finish = answer.error, Finish.TOOL_ERROR
        if answer.error is None and answer.observation:
            running.answer = str(answer.observation[0]["content"])
        if running.error is not None:
            self._errors[running.error] += 1
        if running.session.turns:
            return self._finish(running, tuple(running.session.turns))
        # A rollout has at least one token: that of a policy which was never asked is not trained on.
        if running.error is None and running.limit is None:
            running.error, running.finish = "the agent never asked the policy", Finish.TOOL_ERROR
            self._errors[running.error] += 1
        ids = self.chat.encode(self.problems[running.problem])[-self.max_prompt_length :]
        request = Request(prompt_ids=ids, seeds=(self._seed(running, 0),), max_tokens=(1,))
        prompt = Prompt(token_ids=ids, messages=())
        self._add(request, _Owner(answer.number, running, prompt=prompt))

    def _leave(self, number: int, running: _Running) -> None:
        """No more requests of this agent."""
        self.pool.end(number)
        self._running.pop(number, None)
        self.settings.endpoint.forget(running.session_id)
        if running.sample_of is not None:
            self._cancelled.append(running.sample_of)  # its keys and values are not needed any more
        if running.active is not None:
            self._cancel(running.active)
            running.active.finish(session_over())
            running.active = None
        for call in running.waiting:
            call.finish(session_over())
        running.waiting.clear()

    def _finish(
        self,
        running: _Running,
        turns: tuple[Turn, ...],
        prompt: Prompt | None = None,
        *,
        is_silent: bool = False,
    ) -> None:
        session = running.session
        text = session.last_text if running.answer is None else running.answer
        messages = session.messages_behind(self.problems[running.problem].messages)
        if text and text != session.last_text:
            messages.append({"role": "assistant", "content": text})
        episode = Episode(
            finish=running.finish,
            messages=tuple(messages),
            rewards=(0.0,) * len(turns),
            seconds=tuple(running.seconds[1:]),
            num_tool_calls=session.num_tool_calls,
            num_tool_errors=session.num_tool_errors,
            environment_s=sum(running.seconds),
            error=running.error,
            is_silent=is_silent,
        )
        self._finished.append(
            Sampled(
                problem=running.problem,
                sample=running.sample,
                turns=turns,
                text="" if running.error is not None else text,
                episode=episode,
                prompt_ids=session.prompt_ids if prompt is None else prompt.token_ids,
            )
        )
