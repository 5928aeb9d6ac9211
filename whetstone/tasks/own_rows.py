"""Rows of the user's own: a prompt, an optional answer, and how the two are compared.

`match` is exact, normalized, numeric, letter, math or none; by default the one that suits the answers.
With `none` the user's own `reward_funcs` pay alone. All columns reach these by name, as in TRL.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.plugins import is_plugin
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards import matching
from whetstone.rewards.answers import math_equal
from whetstone.tasks import rows
from whetstone.tasks.base import NO_THOUGHTS
from whetstone.tasks.row_reader import Example, list_columns
from whetstone.terminal.text import counted
from whetstone.types import Problem, TaskScore, normal_form, question_text

_KINDS = {"numeric": "numbers", "letter": "letters of options", "math": "mathematics", "none": ""}


class RowsTask(rows.RowTask):
    default_settings = rows.row_settings("rows")
    description = (
        "Your own rows: a prompt, and an answer or a reward function of your own (docs/data.md; path=FILE or "
        "dataset=HUB_NAME)"
    )
    isolated = True
    scorer_modules = ("math_verify",)
    suitable_match = ""  # by the answers

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        rows.check_settings(self.settings, self.default_settings, name)
        match = self.settings.get("match")
        if match is not None and match not in matching.MATCHES:
            raise UserError(
                f"The task {name} has match {rows.short_repr(match)}"
                f"{did_you_mean(str(match), matching.MATCHES) or '.'} "
                f"Choose from {', '.join(matching.MATCHES)}."
            )
        self.failure_reward = min(0.0, config.tasks.reward_wrong, config.tasks.reward_no_answer)
        self._has_own_function = any(map(is_plugin, config.tasks.reward_funcs))
        self._imitates = config.loss.is_supervised and not config.rollout.rejection_sampling

    @cached_property
    def _examples(self) -> list[Example]:
        """Every row of the source that has a prompt."""
        compares_completions = not (self._imitates or self._has_own_function)
        self._reader.also_used = tuple(self._reader.columns) if self._has_own_function else ()
        return self._reader.read(imitates=self._imitates, compares_completions=compares_completions)

    @cached_property
    def match(self) -> str:
        """How answers are compared: as set, or as suits them."""
        truths = [example.answer for example in self._examples if example.answer is not None]
        suitable = "letter" if "options" in self._reader.roles else self.suitable_match
        match = suitable if suitable and truths else matching.match_for(truths)
        match = self.settings.get("match") or match
        if self._imitates:
            return match if truths else "none"
        needs_answers = "accuracy" in self.config.tasks.reward_funcs and not self._has_own_function
        if needs_answers if match == "none" else not truths:
            remedy = f"set answer_column to one of its columns ({list_columns(self._reader.columns)})"
            if {"chosen", "rejected"} <= {*self._reader.columns} or "rating" in self._reader.roles:
                remedy = "these are preferences: train on the good answers by `whet sft`"
            remedy = "leave match out" if truths else remedy
            raise UserError(
                f"{self._where} has no answers to compare, so accuracy can't be paid: {remedy}, or pay by a "
                "function of your own, reward_funcs=[my_rewards.py:my_function]."
            )
        return match

    @cached_property
    def _rows(self) -> list[Example]:
        examples = self._examples
        if self._imitates:
            examples = [e for e in examples if e.solution is not None or e.answer is not None]
            self.why_left_out = "rated bad, or empty" if "rating" in self._reader.roles else self.why_left_out
        elif self.match != "none":
            examples = [e for e in examples if e.answer is not None]
        if not examples:
            needed = "a solution to imitate: set solution" if self._imitates else "a prompt: set prompt"
            raise UserError(f"{self._where} has no row with {needed}_column.")
        self._answer_kind, self._repeated = _KINDS.get(self.match, "text"), _repetitions(examples)
        return self._own_side(examples, [question_text(example.messages) for example in examples])

    def problem(self, index: int) -> Problem:
        example = self._rows[index]
        answer: dict[str, Any] = {"answer": example.answer, "match": self.match}
        if self._imitates:
            answer["solution"] = example.solution
        if self._has_own_function:  # nobody else reads the other columns
            answer["columns"] = example.columns
        problem = self.make_problem(index, example.messages[-1]["content"], answer, example.messages)
        return replace(problem, tools=example.tools) if example.tools else problem

    def score(self, problem: Problem, text: str) -> TaskScore:
        tasks, match = self.config.tasks, problem.answer["match"]
        answer = self._extract(text, match)
        if match == "none":
            return TaskScore(correct=None, reward=0.0 if self._imitates else None, answer=answer)
        if answer is None:
            return TaskScore(correct=False, reward=tasks.reward_no_answer)
        truth = problem.answer["answer"]
        if match == "letter" and matching.letter_of(answer) is None:  # the text of the option is right, too
            truth = dict(matching.OPTION_LINE.findall(problem.question)).get(matching.letter_of(truth), truth)
        correct = matching.same(answer, truth, match)
        reward = tasks.reward_correct if correct else tasks.reward_wrong
        return TaskScore(correct=correct, reward=reward, answer=answer)

    def _extract(self, text: str, match: str) -> str | None:
        return matching.extract(text, match)

    @property
    def evaluates_text(self) -> bool:
        return self.settings.get("match", "math") == "math"

    def warm_up(self) -> None:
        math_equal("1+x", "x+1")

    def gold(self, problem: Problem) -> str | None:
        truth = problem.answer["answer"]
        if problem.answer["match"] == "none" or truth is None or "answer>" in truth or "\\boxed" in truth:
            return None
        return f"{NO_THOUGHTS}<answer>{truth}</answer>"

    def solution(self, problem: Problem) -> Any:
        """What the assistant says in the row, as it is written; a message where it has more than a text."""
        message = problem.answer.get("solution")
        if message is None:
            return super().solution(problem)
        return message["content"] if message.keys() == {"role", "content"} else message

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"answer": problem.answer["answer"], **problem.answer.get("columns", {})}

    def notes(self) -> list[str]:
        """What was read, how often questions repeat, how answers are compared, what is paid."""
        tasks, lines = self.config.tasks, super().notes()
        lines += [self._repeated] if self._repeated else []
        if self._prompt is not None and any(e.messages[0]["role"] == "system" for e in self._rows):
            lines.append("developer_prompt replaces the system messages of the rows (null keeps them)")
        if self.match == "none":
            reason = f"the reward comes from {', '.join(tasks.reward_funcs)} alone"
            reason = "the evaluation shows lengths, its reward is 0" if self._imitates else reason
            lines.append(f"without answers there is no accuracy; {reason}")
        elif "accuracy" in tasks.reward_funcs and not self._imitates:
            lines.append(
                f"accuracy pays {tasks.reward_correct:g} for a right answer (match: {self.match}), "
                f"{tasks.reward_wrong:g} for a wrong one, {tasks.reward_no_answer:g} for none"
            )
        return [lines[0], *(f"{self.name}: {line}." for line in lines[1:])]


def _repetitions(examples: list[Example]) -> str:
    """How many rows repeat a question, and how many of them with another answer."""
    first: dict[str, Example] = {}
    pairs = [(first.setdefault(normal_form(question_text(e.messages)), e), e) for e in examples]
    again = [(normal_form(a.answer or ""), normal_form(b.answer or ""), b) for a, b in pairs if a is not b]
    differ = [example.number for before, now, example in again if before != now]
    text = f"{counted(len(again), 'row')} with the question of an earlier row"
    text += f", {len(differ):,} with another answer (row {differ[0]:,} first)" if differ else ""
    return text if again else ""
