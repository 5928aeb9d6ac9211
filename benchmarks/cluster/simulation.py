"""Discrete event model of training steps: engines that sample, stragglers, the trainer, weights on their way.

Engines decode in segments: between two completions nothing changes but the length of the cache. Lengths are
drawn by a seed, so that a simulation repeats itself. stages.py has what the stages take on a cluster.
"""

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from whetstone.cost.timing import SPREAD

NUM_BATCHES, MAX_DRAWN = 4, 16_384  # batches, of which the first is not counted; completions in all of them
Groups = Sequence[Sequence[int]]  # lengths of completions


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines of one kind; seconds of one of them."""

    number: int
    slots: int  # sequences that it decodes at once
    step_s: Callable[[int], float]  # a token for each of so many sequences, without their cache
    cache_token_s: float  # reading the keys and values of a token
    prompt_tokens: int
    host_s: Callable[[int], float] = lambda sequences: 0.0  # of a step, during which the GPU computes
    start_s: float = 0.0
    prompt_s: float = 0.0  # for each prompt: prefill and host
    sequence_s: float = 0.0  # for each completion: host
    is_shared: bool = False  # servers: one queue of samples; otherwise groups are assigned in whole


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A step: weights to the engines, sampling, rollouts to all ranks, the update."""

    engines: Engines
    transfer_s: float
    exchange_s: float
    update_s: float
    is_colocated: bool = True  # the same GPUs sample and train
    is_ahead: bool = False  # one step off: the next batch is sampled during the update


@dataclass(frozen=True, kw_only=True)
class Result:
    step_s: float
    rollout_s: float  # of a batch, with its exchange
    trainer_idle: float  # share of the time; of colocated GPUs the same as `sampler_idle`
    sampler_idle: float
    tokens_per_s: float


def simulate(stages: Stages, batches: Sequence[Groups]) -> Result:
    """Train on `batches`, one after the other."""
    assert not (stages.is_ahead and stages.is_colocated), "one GPU does not sample and train at once"
    return _Simulation(stages, batches).run()


def longest_first(groups: Groups) -> Groups:
    return sorted(groups, key=max, reverse=True)


def fullest_engine_seconds(kind: Engines, groups: Groups) -> float:
    """Of the engine with the longest completion, without the others: a quick estimate of a rollout.

    `groups`: by `longest_first`; for servers, of one completion each.
    """
    queue = deque((index, length) for index, group in enumerate(groups[:: kind.number]) for length in group)
    engine = _Engine(kind, functools.cache(kind.step_s), queue)
    seconds = engine.start(kind.slots)
    while engine.running:
        seconds += engine.complete()
    return seconds


def draw_batches(
    *,
    prompts: int,
    group: int,
    mean: float,
    longest: int,
    spread: float = SPREAD,
    seed: int = 0,
) -> list[list[list[int]]]:
    """Lognormal lengths, cut at `longest`, with this mean after the cut. Of large batches there are fewer."""
    number = max(2, min(NUM_BATCHES, MAX_DRAWN // (prompts * group)))
    generator = random.Random(seed)
    location = _location(mean, longest, spread)

    def length() -> int:
        return longest if location is None else _length(generator.lognormvariate(location, spread), longest)

    return [[[length() for _ in range(group)] for _ in range(prompts)] for _ in range(number)]


def _length(value: float, longest: int) -> int:
    return max(1, min(longest, round(value)))


def _location(mean: float, longest: int, spread: float) -> float | None:
    """The mean of the logarithm; None: all are as long as they may be."""
    if mean >= 0.999 * longest:
        return None
    if spread == 0:
        return math.log(mean)
    low, high = math.log(mean) - spread**2 / 2, math.log(longest) + 10 * spread
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_after_cut(middle, longest, spread) < mean else (low, middle)
    return low


def _mean_after_cut(location: float, longest: int, spread: float) -> float:
    end = (math.log(longest) - location) / spread

    def below(value: float) -> float:
        return 0.5 * math.erfc(-value / math.sqrt(2))

    return math.exp(location + spread**2 / 2) * below(end - spread) + longest * (1 - below(end))


class _Engine:
    """One engine and its queue of (prompt, length); the queue of servers is common to all."""

    def __init__(self, kind: Engines, step_s: Callable[[int], float], queue: deque[tuple[int, int]]):
        self.kind, self.step_s, self.queue = kind, step_s, queue
        self.running: list[tuple[int, int]] = []  # a heap: step of the last token, length
        self.steps = self.cached = 0  # decode steps, tokens in the cache
        self.last_prompt = -1

    def start(self, limit: int) -> float:
        """Take up to `limit` samples; the seconds before the first token."""
        return self.kind.start_s + self._admit(limit) + self._segment_s()

    def complete(self) -> float:
        """The shortest sequences end and others begin; seconds until the next end."""
        end = self.running[0][0]
        self.cached += len(self.running) * (end - self.steps)
        self.steps, finished = end, 0
        while self.running and self.running[0][0] == end:
            self.cached -= self.kind.prompt_tokens + heapq.heappop(self.running)[1]
            finished += 1
        seconds = finished * self.kind.sequence_s
        if self.queue:
            seconds += self._admit(self.kind.slots)
        return seconds + (self._segment_s() if self.running else 0.0)

    def _admit(self, limit: int) -> float:
        prompts = 0
        while self.queue and len(self.running) < min(limit, self.kind.slots):
            prompt, length = self.queue.popleft()
            prompts += self.kind.is_shared or prompt != self.last_prompt
            self.last_prompt = prompt
            heapq.heappush(self.running, (self.steps + length, length))
            self.cached += self.kind.prompt_tokens
        return prompts * self.kind.prompt_s

    def _segment_s(self) -> float:
        """Decode steps until the next sequence ends."""
        number, steps = len(self.running), self.running[0][0] - self.steps
        cached = steps * self.cached + number * steps * (steps - 1) / 2
        seconds = steps * self.step_s(number) + self.kind.cache_token_s * cached
        return max(seconds, steps * self.kind.host_s(number))


class _Rollout:
    """A batch on the engines: whether it is there, its seconds, and those of busy engines."""

    def __init__(self, groups: Groups, started_at: float):
        self.tokens = sum(map(sum, groups))
        self.started_at = started_at
        self.num_sampling = 0  # engines that are not done
        self.is_done = False
        self.seconds = self.busy_s = 0.0
        self.then: Callable[[], None] | None = None  # who waits for it


Wait = Generator[float | _Rollout]


class _Simulation:
    """The queue of events (time, order, handler), and the trainer as a process that yields what it waits for.

    The order of its waits is that of train.py with rollout/source.py and rollout/async_source.py.
    """

    def __init__(self, stages: Stages, batches: Sequence[Groups]):
        self.stages, self.batches = stages, batches
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.rollouts: list[_Rollout] = []
        self.ends: list[float] = []  # of updates
        self.step_s = functools.cache(stages.engines.step_s)

    def run(self) -> Result:
        self._resume(self._train_ahead() if self.stages.is_ahead else self._train())
        while self.events:
            self.now, _, handle = heapq.heappop(self.events)
            handle()
        return self._result()

    def _train(self) -> Wait:
        for groups in self.batches:
            yield self.stages.transfer_s
            yield self._sample(groups)
            yield self.stages.update_s
            self.ends.append(self.now)

    def _train_ahead(self) -> Wait:
        yield self.stages.transfer_s
        pending = self._sample(self.batches[0])
        for step in range(len(self.batches)):
            yield pending
            if step > 0:
                yield self.stages.transfer_s
            if step + 1 < len(self.batches):
                pending = self._sample(self.batches[step + 1])
            yield self.stages.update_s
            self.ends.append(self.now)

    def _resume(self, process: Wait) -> None:
        for wait in process:
            if isinstance(wait, float | int):
                self._after(wait, lambda: self._resume(process))
                return
            if not wait.is_done:
                wait.then = lambda: self._resume(process)
                return

    def _after(self, seconds: float, handle: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), handle))

    def _sample(self, groups: Groups) -> _Rollout:
        """Start a batch on all engines."""
        kind, rollout = self.stages.engines, _Rollout(groups, self.now)
        self.rollouts.append(rollout)
        samples = [[(prompt, length) for length in group] for prompt, group in enumerate(groups)]
        if kind.is_shared:
            queue = deque(itertools.chain.from_iterable(samples))
            first = -(-len(queue) // kind.number)
            engines = [_Engine(kind, self.step_s, queue) for _ in range(-(-len(queue) // first))]
        else:
            first = kind.slots
            queues = (samples[index :: kind.number] for index in range(min(kind.number, len(samples))))
            engines = [
                _Engine(kind, self.step_s, deque(itertools.chain.from_iterable(queue))) for queue in queues
            ]
        rollout.num_sampling = len(engines)
        for engine in engines:
            self._decode(rollout, engine, engine.start(first))
        return rollout

    def _decode(self, rollout: _Rollout, engine: _Engine, seconds: float) -> None:
        rollout.busy_s += seconds
        self._after(seconds, lambda: self._complete(rollout, engine))

    def _complete(self, rollout: _Rollout, engine: _Engine) -> None:
        if engine.running:
            self._decode(rollout, engine, engine.complete())
            return
        rollout.num_sampling -= 1
        if rollout.num_sampling == 0:
            self._after(self.stages.exchange_s, lambda: self._finish(rollout))

    def _finish(self, rollout: _Rollout) -> None:
        rollout.is_done, rollout.seconds = True, self.now - rollout.started_at
        if rollout.then is not None:
            rollout.then()

    def _result(self) -> Result:
        """Of all steps but the first, which has nothing to overlap with."""
        steps, rollouts = len(self.ends) - 1, self.rollouts[1:]
        elapsed = self.ends[-1] - self.ends[0]
        training = steps * self.stages.update_s / elapsed
        sampling = sum(rollout.busy_s for rollout in rollouts) / self.stages.engines.number / elapsed
        together = max(0.0, 1 - training - sampling)  # of one engine: 0 up to rounding
        return Result(
            step_s=elapsed / steps,
            rollout_s=sum(rollout.seconds for rollout in rollouts) / steps,
            trainer_idle=together if self.stages.is_colocated else 1 - training,
            sampler_idle=together if self.stages.is_colocated else 1 - sampling,
            tokens_per_s=sum(rollout.tokens for rollout in rollouts) / elapsed,
        )
