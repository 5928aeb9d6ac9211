"""Our mixture as TRL's dataset, in the tokens that our trainer sees; our scorer as its reward function."""

import copy
import json
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from whetstone.config import Config
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.tasks.mixture import Mixture
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Turn


class Problems:
    """The training problems as TRL's dataset: a column of numbers; prompts are made when asked for."""

    def __init__(self, tasks: Mixture, chat: Chat, config: Config, max_length: int | None):
        self.chat, self.config, self.max_length = chat, config, max_length
        self.problem = lru_cache(maxsize=4096)(tasks.problem)

    def dataset(self, count: int) -> Any:
        from datasets import Dataset

        return Dataset.from_dict({"index": list(range(count))}).with_transform(self._rows)

    def _rows(self, columns: dict[str, list[int]]) -> dict[str, list[Any]]:
        problems = [self.problem(index) for index in columns["index"]]
        for problem in {problem.id: problem for problem in problems}.values():
            self._check_length(problem)
        return {"index": columns["index"], "prompt": [self.prompt(problem) for problem in problems]}

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
                "TRL can't cut it: raise max_prompt_length, or set trainer=whetstone."
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
        self.started_at = self.ended_at = 0.0

    def reward(self, *, completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        """The combined reward of every completion; TRL gives all completions of a problem in a row."""
        self.started_at = time.monotonic()
        chat, problems = self.problems.chat, [self.problems.problem(number) for number in index]
        texts = [chat.decode(ids) for ids in completion_ids]
        ends = [Finish.STOP if ids[-1] in self.stops else Finish.LENGTH for ids in completion_ids]
        for problem, ids, text, end in zip(problems, completion_ids, texts, ends, strict=True):
            cut = end is Finish.LENGTH
            self.scorer.submit(ScoringRequest(problem=problem, text=text, completion_ids=ids, truncated=cut))
        scores, rollouts = self.scorer.gather(), []
        for problem, ids, text, end, score in zip(problems, completion_ids, texts, ends, scores, strict=True):
            unknown = (float("nan"),) * len(ids)  # TRL's generate keeps no logprobs
            completion = Completion(token_ids=tuple(ids), logprobs=unknown, finish=end, policy_version=0)
            prompt = chat.encode(problem)
            rollouts.append(
                Rollout(prompt_ids=prompt, turns=(Turn(completion=completion),), text=text, score=score)
            )
        size = self.num_generations
        starts = range(0, len(rollouts), size)
        self.groups = [Group(problem=problems[i], rollouts=tuple(rollouts[i : i + size])) for i in starts]
        self.ended_at = time.monotonic()
        return [score.reward for score in scores]
