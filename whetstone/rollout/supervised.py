"""Supervised fine-tuning as a source of batches: solutions of the tasks in the place of sampled completions.

Used with `loss_type: sft`. The loop, packing, update, evaluation and checkpoints are those of RL: a solution
is a completion without sampling logprobs and without a score. `rejection_sampling` (STaR) instead samples
completions from the policy and keeps the correct ones.
"""

from dataclasses import replace

from whetstone.errors import UserError
from whetstone.rollout.source import RolloutBatch, RolloutSource
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn

NO_SCORE = Score(reward=0.0, parts={}, answer=None)
MAX_ROUNDS = 8  # of sampling, until one answer of a batch is correct


class SupervisedSource(RolloutSource):
    """Batches of problems with their solutions."""

    def sync_weights(self, step: int) -> None:
        """Only evaluations sample: the engine needs the weights of no other step."""
        plan = self._plan
        if step in (0, plan.num_steps) or plan.is_due(plan.eval_every, step):
            super().sync_weights(step)

    def probe(self, first: int, number: int) -> list[Group]:
        """The solutions of training problems from `first` on."""
        return self._collect(0, 0, list(range(first, first + number)))

    def _collect(self, step: int, attempt: int, indices: list[int]) -> list[Group]:
        problems = [self._tasks.problem(index, self._curriculum.levels) for index in indices]
        return [Group(problem=problem, rollouts=(self._rollout(problem, step),)) for problem in problems]

    def _rollout(self, problem: Problem, step: int) -> Rollout:
        solution = self._tasks.tasks[problem.task].solution(problem)
        if solution is None:
            raise UserError(
                f"{problem.id} has no solution to imitate: give rows with a column completion, solution or "
                "messages, set solution_column, or set rejection_sampling=true to train on correct samples."
            )
        limit = self._config.rollout.max_completion_length
        prompt = self._collector.encode(problem, limit)
        tokens = self._collector.codec.encode_solution(problem, solution)
        completion = Completion(
            token_ids=tokens[:limit],
            logprobs=(0.0,) * min(limit, len(tokens)),
            finish=Finish.LENGTH if len(tokens) > limit else Finish.STOP,
            policy_version=step,
        )
        text = solution if isinstance(solution, str) else self._collector.codec.decode(tokens)
        return Rollout(prompt_ids=prompt, turns=(Turn(completion=completion),), text=text, score=NO_SCORE)


class RejectionSampledSource(RolloutSource):
    """Batches of the policy's own correct completions; a prompt without any contributes nothing."""

    _accept_ratio = 0.0

    def sample(self, step: int) -> RolloutBatch:
        batch = super().sample(step)
        return replace(
            batch, metrics={**batch.metrics, "rejection_sampling/accept_ratio": self._accept_ratio}
        )

    def _collect(self, step: int, attempt: int, indices: list[int]) -> list[Group]:
        for number in range(attempt, attempt + MAX_ROUNDS):
            groups = super()._collect(step, number, indices)
            accepted = [_correct(group) for group in groups]
            num_samples = sum(len(group.rollouts) for group in groups)
            self._accept_ratio = sum(len(group.rollouts) for group in accepted) / num_samples
            if self._accept_ratio > 0:
                return [group for group in accepted if group.rollouts]
        raise UserError(
            f"No completion was correct in {MAX_ROUNDS} rounds over {len(indices)} problems, so there is "
            "nothing to train on: make the problems easier, raise num_generations, or give solutions."
        )


def _correct(group: Group) -> Group:
    """The different correct completions of a group."""
    different = {rollout.completion.token_ids: rollout for rollout in reversed(group.rollouts)}
    correct = [rollout for rollout in different.values() if rollout.score.parts.get("correct") == 1.0]
    return Group(problem=group.problem, rollouts=tuple(reversed(correct)))
