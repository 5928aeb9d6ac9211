"""Stops a run whose scoring fails on more answers than `max_reward_failure_fraction` allows."""

from collections import deque
from collections.abc import Mapping, Sequence

from whetstone.config.sections import TasksConfig
from whetstone.errors import UserError
from whetstone.tasks.scoring.process import ScoringRequest

_MIN_FAILURES = 3  # fewer never stop a run, whatever their share
_WINDOW = 10  # batches whose failures count together, so that small steps can't hide them


class FailureLimit:
    """Counts the failures of recent batches."""

    def __init__(self, tasks: TasksConfig) -> None:
        self._tasks = tasks
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW)  # (failures, answers) of past batches

    def record(self, num_failures: int, num_answers: int) -> None:
        self._recent.append((num_failures, num_answers))

    def check(self, failures: Mapping[int, str], requests: Sequence[ScoringRequest]) -> None:
        """Raise where the current batch, alone or with the recent ones, has too many failures."""
        if not failures:
            return
        count = len(failures) + sum(failed for failed, _ in self._recent)
        total = len(requests) + sum(answers for _, answers in self._recent)
        now, share = len(failures), self._tasks.max_reward_failure_fraction
        is_many_now = now >= _MIN_FAILURES and now > share * len(requests)
        if not is_many_now and (count < _MIN_FAILURES or count <= share * total):
            return
        if is_many_now:
            count, total = now, len(requests)
        number, reason = next(iter(failures.items()))
        request = requests[number]
        raise UserError(
            f"Scoring failed on {count} of {total} answers, more than max_reward_failure_fraction "
            f"({share:g}) allows. The first was {request.problem.id} "
            f"with '{reason}', on the text "
            f"{request.text[-200:]!r}: mend the reward, or raise reward_timeout_s "
            f"({self._tasks.reward_timeout_s:g} s) or that share."
        )
