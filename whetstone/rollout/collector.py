"""Problems -> scored groups: encode prompts, sample completions, score each as it finishes."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, Self

from whetstone import seeds
from whetstone.config import Config
from whetstone.config.environments import EnvironmentsConfig
from whetstone.endpoint.choice import ChatCodec
from whetstone.engines.base import Engine, Request, SamplingParams, generate_open
from whetstone.environments.toolbox import TOOLBOX, block_arguments
from whetstone.errors import UserError, explained, first_line, is_out_of_memory
from whetstone.parallel.collectives import all_gather_data_objects
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.rollout.agents.stream import AgentSettings, AgentStream
from whetstone.rollout.episodes import Environments, Sampled
from whetstone.rollout.rollout_func import RolloutFunction
from whetstone.rollout.tensor_parallel import stream_of
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.terminal.stages import advance, show, stage
from whetstone.types import Finish, Group, Outcome, Problem, Rollout, Score, Turn


class RolloutCancelled(Exception):
    """Sampling was cancelled because the run ends."""


class GroupCollector(Protocol):
    """What evaluation needs of a collector."""

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]: ...


class NullScorer(contextlib.AbstractContextManager["NullScorer"]):
    """Scores nothing: for tensor-parallel ranks whose first rank scores the same tokens."""

    def __init__(self) -> None:
        self._count = 0
        self.custom_metrics: dict[str, list[float]] = {}

    def submit(self, request: ScoringRequest) -> None:
        self._count += 1

    def gather(self) -> list[Score]:
        count, self._count = self._count, 0
        return [Score(reward=0.0, parts={"correct": 0.0}, answer=None)] * count

    def discard(self) -> None:
        self._count = 0

    def probing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """What a collector needs for problems with environments."""

    pool: Environments
    config: EnvironmentsConfig
    ranks: Ranks = SINGLE
    tools: tuple[Mapping[str, Any], ...] = ()  # descriptions of the run's own tools

    @functools.cached_property
    def block_arguments(self) -> dict[str, str]:
        """Of tools that are called by blocks of code: name -> argument."""
        return block_arguments(self.tools) if self.config.tool_call_format == "code_block" else {}

    def add_tools(self, problem: Problem) -> Problem:
        """The problem with the run's tools. An environment in Gymnasium's shape takes no calls."""
        names = [tool["function"]["name"] for tool in (*self.tools, *problem.tools)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"tools and the environment both have a tool {twice[0]}: rename one of them.")
        if problem.environment is None and self.tools:
            described = () if self.block_arguments else self.tools
            return replace(problem, environment=TOOLBOX, tools=described, scored_by_task=True)
        return replace(problem, tools=(*self.tools, *problem.tools)) if problem.takes_calls else problem


@dataclass(frozen=True, kw_only=True)
class CollectReport:
    """What was counted and measured while groups were collected."""

    num_truncated_prompts: int = 0
    scoring_s: float = 0.0  # waiting for scores after the last sample
    idle_s: float = 0.0  # of the engine, waiting for environments or agents
    custom_metrics: Mapping[str, list[float]] = field(
        default_factory=dict
    )  # from the user's reward functions

    @classmethod
    def merge(cls, reports: Sequence[Self], seconds: Callable[[Iterable[float]], float] = max) -> Self:
        """Of several ranks; with `seconds=sum`, of one collection after the other."""
        names = dict.fromkeys(name for report in reports for name in report.custom_metrics)
        return cls(
            num_truncated_prompts=sum(report.num_truncated_prompts for report in reports),
            scoring_s=seconds(report.scoring_s for report in reports),
            idle_s=seconds(report.idle_s for report in reports),
            custom_metrics={
                name: [value for report in reports for value in report.custom_metrics.get(name, ())]
                for name in names
            },
        )


class Collector:
    """Every rank samples and scores its shard of the problems, and gets the groups of all, in order.

    Of tensor-parallel ranks, which decode the same tokens, only the first scores.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer | NullScorer,
        codec: ChatCodec,
        *,
        max_prompt_length: int | None,
        max_length: int | None,
        episodes: EpisodeSettings | None = None,
        agents: AgentSettings | None = None,
        rollout_func: RolloutFunction | None = None,
        ranks: Ranks = SINGLE,
        side_group: Any = None,
    ):
        """`side_group`: a second process group, for a thread that samples during the update."""
        self.engine, self.scorer, self.codec = engine, scorer, codec
        self.agents = agents  # where the rollouts come from an agent
        self.episodes = episodes  # of tasks that have environments
        self.rollout_func = rollout_func  # samples in place of one request for each problem
        self.max_prompt_length = max_prompt_length  # longer prompts are truncated on the left
        self.max_length = max_length  # of prompt plus completion, as the model allows
        self.ranks, self._side_group = ranks, side_group
        self.report = CollectReport()  # of all collections since the caller last replaced it
        self.cancelled = False  # set from another thread: stop at the next sample

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        """`num_samples` scored completions per problem; a sample's seed is (seed_parts, problem, sample).

        All ranks call it together.
        """
        earlier, self.report = self.report, CollectReport()
        groups, failure, cancelled = [], None, False
        shard = problems[self.ranks.data_rank :: self.ranks.data_size]
        try:
            groups = self._collect(shard, num_samples, sampling, seed_parts) if shard else []
        except UserError as error:
            failure = str(error)
        except RolloutCancelled:  # reported too: other ranks may wait for this rank's groups
            cancelled = True
        own = (groups, self.report, failure, cancelled)
        gathered = all_gather_data_objects(self.ranks, own, self._side_group)
        shards, reports, failures, is_cancelled = zip(*gathered, strict=True)
        if reason := next(filter(None, failures), None):
            raise UserError(reason)
        if any(is_cancelled):
            raise RolloutCancelled
        self.report = CollectReport.merge([earlier, CollectReport.merge(reports)], seconds=sum)
        return [shards[i % len(shards)][i // len(shards)] for i in range(len(problems))]

    def _collect(
        self,
        problems: list[Problem],
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        if self.episodes is not None and self.episodes.tools:
            problems = [self.episodes.add_tools(problem) for problem in problems]
        encode = self.encode if self.agents is None else lambda *_: ()  # an agent writes its own prompts
        prompts = [encode(problem, sampling.max_tokens) for problem in problems]
        requests = [
            Request(
                prompt_ids=prompt,
                seeds=tuple(seeds.seed(*seed_parts, *problem.seed_parts, n) for n in range(num_samples)),
                may_continue=problem.environment is not None,
            )
            for problem, prompt in zip(problems, prompts, strict=True)
        ]
        sampled: list[Sampled] = []
        with stage("sampling", total=len(problems) * num_samples), explain_engine_oom():
            self.engine.wake()
            for done in self._sample(problems, requests, sampling, seed_parts):
                if self.cancelled:
                    self._cancel()
                if not done.has_failed:
                    request = scoring_request(problems[done.problem], done, self.codec, prompts[done.problem])
                    self.scorer.submit(request)  # overlaps with sampling
                sampled.append(done)
                advance()
                show(problems[done.problem].question, done.text)
            self.engine.sleep()
        if self.cancelled:
            self._cancel()
        started = time.monotonic()
        with stage("scoring", total=len(sampled)):
            scores = self.scorer.gather()
        is_judged = not scores or any("correct" in score.parts for score in scores)
        # Of a rollout whose environment or agent failed: no reward function is called.
        failed = Score(reward=0.0, parts={"correct": 0.0} if is_judged else {}, answer=None)
        ordered = iter(scores)
        self.report = replace(
            self.report, scoring_s=time.monotonic() - started, custom_metrics=self.scorer.custom_metrics
        )
        rollouts = {
            (done.problem, done.sample): Rollout(
                prompt_ids=prompts[done.problem] if done.prompt_ids is None else done.prompt_ids,
                turns=done.turns,
                text=done.text,
                score=failed if done.has_failed else next(ordered),
                episode=done.episode,
            )
            for done in sampled
        }
        return [
            Group(problem=problem, rollouts=tuple(rollouts[p, n] for n in range(num_samples)))
            for p, problem in enumerate(problems)
        ]

    def _sample(
        self,
        problems: list[Problem],
        requests: list[Request],
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> Iterator[Sampled]:
        """Finished rollouts in the order in which they finish."""
        if self.agents is not None:
            num_samples = len(requests[0].seeds)
            yield from self._sample_agents(self.agents, problems, num_samples, sampling, seed_parts)
            return
        if self.rollout_func is not None:
            num_samples = len(requests[0].seeds)
            yield from self.rollout_func.sample(
                self.engine, self.codec, problems, num_samples, sampling, seed_parts, self.max_length
            )
            return
        if all(problem.environment is None for problem in problems):
            for output in self.engine.generate(requests, sampling):
                text = self.codec.decode(output.completion.token_ids)
                turns = (Turn(completion=output.completion),)
                yield Sampled(problem=output.request, sample=output.sample, turns=turns, text=text)
            return
        assert self.episodes is not None
        stream = stream_of(
            self.episodes.ranks,
            problems,
            [request.prompt_ids for request in requests],
            num_samples=len(requests[0].seeds),
            sampling=sampling,
            seed_parts=seed_parts,
            pool=self.episodes.pool,
            codec=self.codec,
            config=self.episodes.config,
            block_arguments=self.episodes.block_arguments,
            max_length=self.max_length,
            is_cancelled=lambda: self.cancelled,
        )
        for output in generate_open(self.engine, requests, sampling, stream):
            yield from stream.accept(output)
        yield from stream.drain()
        self.report = replace(self.report, idle_s=stream.idle_s)

    def _sample_agents(
        self,
        agents: AgentSettings,
        problems: list[Problem],
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> Iterator[Sampled]:
        stream = AgentStream(
            problems,
            num_samples=num_samples,
            sampling=sampling,
            seed_parts=seed_parts,
            settings=agents,
            chat=self.codec,
            max_length=self.max_length,
            is_cancelled=lambda: self.cancelled,
        )
        with contextlib.closing(stream):
            first = stream.take(wait=True)
            for output in generate_open(self.engine, first, sampling, stream) if first else ():
                yield from stream.accept(output)
            yield from stream.drain()
        self.report = replace(self.report, idle_s=stream.idle_s)

    def _cancel(self) -> NoReturn:
        self.scorer.discard()
        if self.agents is not None:
            self.agents.pool.end_all()
        if self.episodes is not None:
            self.episodes.pool.end_all()
        raise RolloutCancelled

    def encode(self, problem: Problem, max_tokens: int) -> tuple[int, ...]:
        """The prompt of a problem whose completion may have `max_tokens` tokens."""
        prompt = self.codec.encode(problem)
        if self.max_prompt_length is not None and len(prompt) > self.max_prompt_length:
            prompt = prompt[-self.max_prompt_length :]
            self.report = replace(self.report, num_truncated_prompts=self.report.num_truncated_prompts + 1)
        if self.max_length is not None and len(prompt) + max_tokens > self.max_length:
            raise UserError(
                f"The prompt of {problem.id} has {len(prompt)} tokens, which with {max_tokens} new ones "
                f"exceeds the {self.max_length} that the model allows: lower max_completion_length, shorten "
                "the problems or developer_prompt (null leaves it out), or set max_prompt_length."
            )
        return prompt


def scoring_request(
    problem: Problem, done: Sampled, codec: ChatCodec, prompt: tuple[int, ...]
) -> ScoringRequest:
    """`prompt`: of the problem, where the rollout has none of its own."""
    context, plain, full = prompt if done.prompt_ids is None else done.prompt_ids, [], []
    for turn in done.turns:
        plain.append(codec.decode(turn.completion.token_ids))
        full.append(codec.turn(turn.context_ids or context, turn.completion.token_ids))
        context = turn.observation_ids
    turns = {plain[-1]: full[-1], "\n".join(plain): "\n".join(full)}  # an agent may answer something else
    first = done.turns[0].completion.token_ids
    rest = [token for turn in done.turns[1:] for token in turn.completion.token_ids]
    finish = done.turns[-1].completion.finish
    return ScoringRequest(
        problem=problem,
        text=done.text,
        turn=turns.get(done.text),
        completion_ids=(*first, *rest) if rest else first,
        truncated=finish is Finish.LENGTH,
        outcome=None if done.outcome is None else Outcome(**done.outcome),
        messages=done.messages if done.episode is None else done.episode.messages,
        environment=done.state,
        columns=done.columns,
    )


def explain_engine_oom() -> contextlib.AbstractContextManager[None]:
    """GPU memory that ran out in the engine, as a UserError with the settings to change."""
    return explained(_engine_oom)


def _engine_oom(error: Exception) -> str | None:
    if not isinstance(error, RuntimeError) or not is_out_of_memory(str(error)):
        return None
    return (
        f"The GPU's memory ran out in the engine while it sampled ({first_line(error)}): set max_num_seqs "
        "lower (64), or max_completion_length."
    )


def sampling_params(config: Config, temperature: float) -> SamplingParams:
    """Sampling parameters of a configuration. Training and evaluation differ in temperature alone."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_completion_length,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        min_p=rollout.min_p or 0.0,
    )
