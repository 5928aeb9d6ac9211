"""The base class of tasks: a task makes problems from an index and scores a completion's text.

A task of your own is a subclass in a file, named in the configuration:
`datasets: {my_task.py:MyTask: {weight: 1, config: {low: 2}}}`. The minimum:

    class MyTask(Task):
        generated = True                          # any index is valid; False: rows, `__len__` of them

        def problem(self, index):
            number = self.settings.get("low", 1) + index
            return self.make_problem(index, f"What is {number} + 1?", answer=number + 1)

        def score(self, problem, text):           # must not raise, and must not evaluate the text
            correct = text.strip() == str(problem.answer)
            return TaskScore(correct=correct, reward=float(correct), answer=text.strip())

`problem(index)` must be a pure function of (`self.seed`, `self.split`, index): training and evaluation, every
scoring worker and a resumed run construct the task again. The other methods have defaults and are optional.

`score` runs in scoring worker processes with a time limit, like your reward functions: with your rights, in
your environment. `isolated = True` moves it into an isolated worker, without network, files and environment
variables; choose that where `score` hands the text to a parser or to `eval`. A task that is not isolated must
treat the text as data.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from whetstone.config import Config, TaskSpec
from whetstone.errors import UserError, did_you_mean
from whetstone.seeds import seed
from whetstone.tasks.prompts import Messages, build_messages, developer_prompt
from whetstone.types import Outcome, Problem, TaskScore

NO_THOUGHTS = "<think>\n</think>\n"  # what the gold answers of tasks begin with
_MAX_ANSWER = 200  # characters that are kept of an episode's last turn


class Task(ABC):
    """A source of problems whose answers can be verified. Knows nothing of models, tokens or steps."""

    description: ClassVar[str] = ""  # a line of `whet tasks`
    isolated: ClassVar[bool] = False  # whether `score` runs in an isolated worker
    scorer_modules: ClassVar[tuple[str, ...]] = ()  # of packages that an isolated worker starts with
    has_curriculum: ClassVar[bool] = False  # whether `at_level` and `max_level` are implemented
    default_settings: ClassVar[Mapping[str, Any]] = {}  # shown by `whet tasks NAME`
    generated: bool = False  # endless, from an index; False: rows of a data set
    failure_reward: float = 0.0  # paid where scoring fails: at most a wrong answer's, or hanging would pay
    max_level: int | None = None  # the highest level of the curriculum, in training with one

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        """`shared`: training and evaluation read the same rows, and each must keep to its side of them."""
        self.config, self.name, self.split, self.shared = config, name, split, shared
        self.settings: dict[str, Any] = spec.config
        base = config.tasks.eval_dataset_seed if split == "eval" else config.tasks.dataset_seed
        self.seed = seed(base, split, name)
        self._prompt = developer_prompt(config.tasks)

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Problem number `index`, always the same. A generated task accepts any non-negative index."""

    @abstractmethod
    def score(self, problem: Problem, text: str) -> TaskScore:
        """Score a completion's text. Never raises on what a model wrote."""

    def score_episode(self, problem: Problem, outcome: Outcome) -> TaskScore:
        """Score an episode by its environment's judgement."""
        answer = outcome.last[:_MAX_ANSWER] or None
        return TaskScore(correct=outcome.correct, reward=outcome.reward, answer=answer)

    @classmethod
    def environments(cls, spec: TaskSpec) -> tuple[str, ...]:
        """Names of the environments that its problems are episodes of."""
        return ()

    def __len__(self) -> int:
        """The number of rows; `dataset_size` for a generated task."""
        return self.config.tasks.dataset_size

    def gold(self, problem: Problem) -> str | None:
        """A completion that earns full marks, for the check before step 1 and `whet tasks`; None: unknown."""
        return None

    def solution(self, problem: Problem) -> str | None:
        """The completion that supervised fine-tuning imitates: of rows their own solution; None: unknown.

        Without an empty place for thoughts, unless the prompt asks for one: tokens that teach nothing.
        """
        gold = self.gold(problem)
        wants_thoughts = any("<think>" in message["content"] for message in problem.messages)
        return gold if gold is None or wants_thoughts else gold.removeprefix(NO_THOUGHTS)

    def columns(self, problem: Problem) -> dict[str, Any]:
        """What reward functions of the user's own get by name, beside prompts and completions."""
        return {"answer": problem.answer}

    @property
    def evaluates_text(self) -> bool:
        """Whether `score` evaluates what the model wrote, so that a machine without isolation is refused."""
        return self.isolated

    def at_level(self, level: int) -> Self:
        """The same task at a level of its curriculum."""
        raise NotImplementedError

    def prepare(self) -> str | None:
        """Called once before training; a sentence to print, or None."""
        return None

    def warm_up(self) -> None:
        """Called in a scoring worker before isolation: import what `score` imports late."""
        return None

    def notes(self) -> list[str]:
        """Sentences about the data that are printed at the start of a run."""
        return []

    def make_problem(
        self, index: int, question: str, answer: Any, messages: Messages = (), label: str = ""
    ) -> Problem:
        """A problem with its id and with the developer prompt of the run. `answer` is plain data for `score`;
        `messages` replace the question where a row has its own; `label` ends the id.
        """
        role = self.config.tasks.developer_role
        return Problem(
            id=f"{self.name}/{self.split}/{index:06d}{label}",
            task=self.name,
            messages=build_messages(self._prompt, role, question, messages),
            answer=answer,
        )


def check_setting_names(settings: Iterable[str], known: Sequence[str], task: str) -> None:
    """Raise on a setting that the task does not have."""
    for key in settings:
        if key not in known:
            raise UserError(
                f"The task {task} has no setting '{key}'{did_you_mean(key, known) or '.'} Its settings are: "
                f"{', '.join(known) or 'none'}."
            )
