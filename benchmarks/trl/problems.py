"""Our mixture as TRL's dataset, in the tokens that our trainer sees; our scorer as its reward function."""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from benchmarks.trl.environments import NO_ENVIRONMENT, count_calls, judge
from whetstone.config import Config
from whetstone.environments.adapter import snapshot
from whetstone.environments.toolbox import tool_schemas
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.rollout.collector import scoring_request
from whetstone.rollout.episodes import Sampled
from whetstone.rollout.rollout_func import split_turns
from whetstone.tasks.mixture import Mixture
from whetstone.tasks.registry import environments_of
from whetstone.tasks.scoring.pool import Scorer
from whetstone.types import Completion, Episode, Finish, Group, Problem, Rollout, Turn


class Problems:
    """The training problems as TRL's dataset: a column of numbers; prompts are made when asked for."""

    def __init__(self, tasks: Mixture, chat: Chat, config: Config, max_length: int | None):
        self.chat, self.config, self.max_length = chat, config, max_length
        self.has_environments = bool(environments_of(config))
        self._tools = tool_schemas(config.environments.tools)
        self._tasks = tasks
        self.problem = lru_cache(maxsize=4096)(self._problem)

    def _problem(self, index: int) -> Problem:
        """With the run's tools, which every problem has; TRL describes them in the prompt."""
        problem = self._tasks.problem(index)
        by_task = problem.environment is None or problem.scored_by_task
        return replace(problem, tools=(*self._tools, *problem.tools), scored_by_task=by_task)

    def dataset(self, count: int) -> Any:
        from datasets import Dataset

        return Dataset.from_dict({"index": list(range(count))}).with_transform(self._rows)

    def _rows(self, columns: dict[str, list[int]]) -> dict[str, list[Any]]:
        problems = [self.problem(index) for index in columns["index"]]
        for problem in {problem.id: problem for problem in problems}.values():
            self._check_length(problem)
        prompts = {"index": columns["index"], "prompt": [self.prompt(problem) for problem in problems]}
        if not self.has_environments:
            return prompts
        return {**prompts, "environment": [p.environment or NO_ENVIRONMENT for p in problems]}

    def prompt(self, problem: Problem) -> Any:
        """Messages for TRL's chat template, or a bare text, to which TRL adds the special tokens."""
        if self.config.model.apply_chat_template:
            return self.chat.messages(problem)
        return self.chat.prompt(problem)

    def tokenizer(self) -> Any:
        """A tokenizer for TRL whose chat template begins the assistant's turn with `assistant_prefix`."""
        tokenizer = copy.deepcopy(self.chat.tokenizer)
        tokenizer.padding_side = "left"
        prefix = self.config.model.assistant_prefix
        if prefix and self.config.model.apply_chat_template:
            # An expression, not a block, and no newline before it: Jinja would treat white space otherwise.
            tail = "{{ " + json.dumps(prefix) + " if add_generation_prompt else '' }}"
            tokenizer.chat_template = tokenizer.chat_template.removesuffix("\n") + tail
        return tokenizer

    def _check_length(self, problem: Problem) -> None:
        length, rollout = len(self.chat.encode(problem)), self.config.rollout
        limit = rollout.max_prompt_length
        if limit is not None and length > limit:
            raise UserError(
                f"The prompt of {problem.id} has {length} tokens, more than max_prompt_length ({limit}), and "
                "TRL can't cut it: raise max_prompt_length, or use `whet train`."
            )
        if self.max_length is not None and length + rollout.max_completion_length > self.max_length:
            raise UserError(
                f"The prompt of {problem.id} has {length} tokens, which with {rollout.max_completion_length} "
                f"new ones exceeds the {self.max_length} that the model allows: lower max_completion_length."
            )


class Rewards:
    """TRL's reward function: our scorer. Keeps the newest batch as groups, for the metrics."""

    def __init__(self, problems: Problems, scorer: Scorer, stops: Sequence[int], num_generations: int):
        self.problems, self.scorer = problems, scorer
        self.stops, self.num_generations = frozenset(stops), num_generations
        self.groups: list[Group] = []
        self.masks: list[list[int]] | None = None  # of the newest batch, where there are tools: 1 for sampled
        self.started_at = self.ended_at = 0.0

    def watch(self, trainer: Any) -> None:
        """Keep the mask of TRL's loop: reward functions are not told which tokens were sampled."""
        loop = trainer._tool_call_loop

        def keep(*args: Any, **options: Any) -> Any:
            result = loop(*args, **options)
            self.masks = result[0]
            return result

        trainer._tool_call_loop = keep

    def reward(
        self,
        *,
        completion_ids: list[list[int]],
        index: list[int],
        completions: Sequence[Any] = (),
        environments: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float]:
        """The combined reward of every completion; TRL gives all completions of a problem in a row."""
        self.started_at = time.monotonic()
        problems = [self.problems.problem(number) for number in index]
        masks = [[1] * len(ids) for ids in completion_ids] if self.masks is None else self.masks
        sampled = [
            self._sampled(
                problem,
                ids,
                mask,
                completions[number] if problem.tools else (),
                None if environments is None else environments[number],
            )
            for number, (problem, ids, mask) in enumerate(zip(problems, completion_ids, masks, strict=True))
        ]
        for problem, done in zip(problems, sampled, strict=True):
            chat = self.problems.chat
            self.scorer.submit(scoring_request(problem, done, chat, chat.encode(problem)))
        rollouts = [
            Rollout(
                prompt_ids=self.problems.chat.encode(problem),
                turns=done.turns,
                text=done.text,
                score=score,
                episode=done.episode,
            )
            for problem, done, score in zip(problems, sampled, self.scorer.gather(), strict=True)
        ]
        size = self.num_generations
        starts = range(0, len(rollouts), size)
        self.groups = [Group(problem=problems[i], rollouts=tuple(rollouts[i : i + size])) for i in starts]
        self.ended_at = time.monotonic()
        return [rollout.score.reward for rollout in rollouts]

    def _sampled(
        self, problem: Problem, ids: list[int], mask: list[int], messages: Sequence[Any], environment: Any
    ) -> Sampled:
        """What TRL sampled as a rollout of ours."""
        finish = Finish.STOP if ids[-1] in self.stops else Finish.LENGTH
        unknown = (float("nan"),) * len(ids)  # TRL's generate keeps no logprobs
        turns = tuple(
            Turn(
                completion=Completion(token_ids=said, logprobs=own, finish=finish, policy_version=0),
                observation_ids=seen,
            )
            for said, own, seen in split_turns(ids, unknown, [bool(value) for value in mask])
        )
        if not problem.tools and problem.environment is None:
            text = self.problems.chat.decode(ids)
            return Sampled(problem=0, sample=0, turns=turns, text=text)
        said = [str(message.get("content") or "") for message in messages if message["role"] == "assistant"]
        outcome, error, state = None, None, None
        if problem.environment is not None:
            outcome, error = judge(environment, said[-1])
            state = snapshot(environment)
        num_calls, num_errors = count_calls(messages)
        plain = [{**message, "content": str(message.get("content") or "")} for message in messages]
        episode = Episode(
            finish=finish if error is None else Finish.TOOL_ERROR,
            messages=tuple(plain),
            rewards=(),
            num_tool_calls=num_calls,
            num_tool_errors=num_errors,
            error=error,
        )
        text = said[-1] if problem.scored_by_task else "\n".join(said)
        return Sampled(
            problem=0, sample=0, turns=turns, text=text, episode=episode, outcome=outcome, state=state
        )
