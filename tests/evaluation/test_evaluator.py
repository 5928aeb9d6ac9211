"""Evaluation: the numbers of a result, what is written, what is compared with step 0, what is shown.

The policy here adds two digits and is right with a given chance, decided by the seeds that the evaluation
hands out; everything else (types, configuration, files, statistics) is the real thing.
"""

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

from whetstone.config.load import build
from whetstone.config.sections import Config
from whetstone.engines.base import SamplingParams
from whetstone.evaluation.display import examples, headline, print_result
from whetstone.evaluation.evaluator import EvalResult, Evaluator, plain_answer
from whetstone.evaluation.statistics import wilson
from whetstone.run.metrics import MetricsLog, read_rows
from whetstone.seeds import seed, uniforms
from whetstone.tasks.constants import measured
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn


def sum_problem(index: int, *, task: str = "sums") -> Problem:
    a, b = index % 10, index // 10 % 10
    question = {"role": "user", "content": f"What is {a} + {b}?"}
    return Problem(id=f"{task}/eval/{index:06d}", task=task, messages=(question,), answer=str(a + b))


@dataclass
class Adder:
    """Right where its sample's random number is below `skill`; greedy: always right on `greedy_right`."""

    skill: float = 0.5
    greedy_right: frozenset[str] = frozenset()
    reward: float = 0.0  # shaped reward, which evaluation must not read
    calls: list[tuple[int, int, SamplingParams]] = field(default_factory=list)

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        self.calls.append((len(problems), num_samples, sampling))
        return [
            Group(
                problem=problem,
                rollouts=tuple(self._rollout(problem, sampling, seed_parts, i) for i in range(num_samples)),
            )
            for problem in problems
        ]

    def _rollout(self, problem: Problem, sampling: SamplingParams, seed_parts: tuple, sample: int) -> Rollout:
        luck = uniforms(seed(*seed_parts, problem.id, sample), 0, 1)[0]
        right = problem.id in self.greedy_right if sampling.temperature == 0 else luck < self.skill
        answer = problem.answer if right else "0" if problem.answer != "0" else "1"
        text = f"<answer>{answer}</answer>"
        tokens = tuple(text.encode())[: sampling.max_tokens]
        finish = Finish.LENGTH if len(tokens) < len(text) else Finish.STOP
        correct = float(answer == problem.answer)
        return Rollout(
            prompt_ids=(1, 2),
            turns=(
                Turn(
                    completion=Completion(
                        token_ids=tokens, logprobs=(0.0,) * len(tokens), finish=finish, policy_version=0
                    )
                ),
            ),
            text=text,
            score=Score(reward=self.reward, parts={"correct": correct, "format": 1.0}, answer=answer),
        )


def configure(**flat) -> Config:
    return build({"max_completion_length": 64, "temperature": 0.8, **flat})


PROBLEMS = [sum_problem(i) for i in range(60)] + [sum_problem(i, task="others") for i in range(40)]


def evaluate(folder: Path, policy: Adder, step: int, *, greedy: bool = False, **flat) -> EvalResult:
    return Evaluator(configure(**flat), PROBLEMS, policy, folder).run(step, greedy=greedy)


def test_accuracy_counts_correct_and_never_reward(tmp_path: Path):
    perfect = evaluate(tmp_path, Adder(skill=1.0, reward=-5.0), 0)
    assert perfect.accuracy.mean == 1.0
    assert (perfect.accuracy.low, perfect.accuracy.high) == wilson(1.0, 100)
    assert evaluate(tmp_path, Adder(skill=0.0, reward=5.0), 1).accuracy.mean == 0.0


def test_seeds_do_not_depend_on_the_step(tmp_path: Path):
    first, second = (evaluate(tmp_path, Adder(), step) for step in (0, 7))
    assert [a.correct for a in first.completions] == [a.correct for a in second.completions]
    assert second.delta_vs_step0 is not None and second.delta_vs_step0.difference == 0.0
    other_run = evaluate(tmp_path / "other", Adder(), 0, seed=43)
    assert [a.correct for a in other_run.completions] != [a.correct for a in first.completions]


def test_versus_start_is_the_paired_test(tmp_path: Path):
    before = evaluate(tmp_path, Adder(skill=0.3), 0)
    after = evaluate(tmp_path, Adder(skill=0.6), 10)  # same luck, so nothing gets worse
    better = round(100 * (after.accuracy.mean - before.accuracy.mean))
    assert before.delta_vs_step0 is None
    assert after.delta_vs_step0 is not None
    assert after.delta_vs_step0.difference == pytest.approx(better / 100)
    assert after.delta_vs_step0.p_value == 2 / 2**better
    per_task = [(task.delta_vs_step0, task.accuracy.num_problems) for task in after.per_task.values()]
    assert sum(versus.difference * num for versus, num in per_task if versus is not None) == pytest.approx(
        better
    )


def test_per_task_numbers(tmp_path: Path):
    result = evaluate(tmp_path, Adder(skill=0.5), 0)
    for name, num in (("sums", 60), ("others", 40)):
        right = sum(a.correct for a in result.completions if a.task == name)
        assert result.per_task[name].accuracy.mean == pytest.approx(right / num)
        assert result.per_task[name].accuracy.num_problems == num


def test_several_samples_give_pass_at_k(tmp_path: Path):
    result = evaluate(tmp_path, Adder(skill=0.5), 0, eval_samples_per_problem=4)
    rights = [sum(a.correct for a in result.completions if a.problem == problem.id) for problem in PROBLEMS]
    assert result.pass_at_k[1] == pytest.approx(result.accuracy.mean) == pytest.approx(sum(rights) / 400)
    assert result.pass_at_k[4] == pytest.approx(sum(right > 0 for right in rights) / 100)
    # with c right of 4, two draws are both wrong with chance (4-c)(3-c)/12
    assert result.pass_at_k[2] == pytest.approx(sum(1 - (4 - c) * (3 - c) / 12 for c in rights) / 100)
    assert [a.sample for a in result.completions[:5]] == [0, 1, 2, 3, 0]


def test_temperatures_and_limits_reach_the_collector(tmp_path: Path):
    policy = Adder(greedy_right=frozenset(problem.id for problem in PROBLEMS[:25]))
    result = evaluate(tmp_path, policy, 0, greedy=True, top_p=0.9, per_device_eval_batch_size=64)
    assert [(num, sampling.temperature) for num, _, sampling in policy.calls] == [
        (64, 0.8), (36, 0.8), (64, 0.0), (36, 0.0)
    ]  # fmt: skip
    assert {(sampling.max_tokens, sampling.top_p) for _, _, sampling in policy.calls} == {(64, 0.9)}
    assert result.temperature == 0.8
    assert result.greedy_accuracy is not None and result.greedy_accuracy.mean == 0.25


def test_an_own_temperature_of_zero_is_one_greedy_pass(tmp_path: Path):
    policy = Adder(greedy_right=frozenset(problem.id for problem in PROBLEMS[:10]))
    result = evaluate(tmp_path, policy, 0, greedy=True, eval_temperature=0.0, eval_samples_per_problem=4)
    assert [(num, samples) for num, samples, _ in policy.calls] == [(100, 1)]
    assert result.greedy_accuracy == result.accuracy
    assert result.accuracy.mean == 0.1


def test_lengths_and_truncation(tmp_path: Path):
    # "<answer>5</answer>" has 18 characters, with a sum of two digits 19: those are cut at 18
    result = evaluate(tmp_path, Adder(skill=1.0), 0, max_completion_length=18)
    two_digits = sum(len(problem.answer) == 2 for problem in PROBLEMS) / 100
    assert result.clipped_ratio == pytest.approx(two_digits) and two_digits > 0
    assert result.mean_length == 18.0


def test_the_file_holds_every_completion(tmp_path: Path):
    result = evaluate(tmp_path, Adder(skill=1.0, greedy_right=frozenset()), 3, greedy=True)
    document = json.loads((tmp_path / "eval_results" / "eval_step_3.json").read_text())
    assert document["step"] == 3
    assert document["summary"]["accuracy"] == {
        "mean": 1.0,
        "low": wilson(1.0, 100)[0],
        "high": 1.0,
        "num_problems": 100,
    }
    assert document["summary"]["greedy_accuracy"]["mean"] == 0.0
    assert document["summary"]["pass_at_k"] == {"1": 1.0}
    assert document["summary"]["per_task"]["sums"]["accuracy"]["num_problems"] == 60
    assert len(document["completions"]) == len(document["greedy_completions"]) == 100
    assert document["completions"][12] == {
        "problem": "sums/eval/000012",
        "task": "sums",
        "sample": 0,
        "messages": [{"role": "user", "content": "What is 2 + 1?"}],
        "gold": "3",
        "completion": "<answer>3</answer>",
        "answer": "3",
        "correct": True,
        "parts": {"correct": 1.0, "format": 1.0},
        "length": 18,
        "finish": "stop",
        "failure": None,
        "outcome": None,
        "tests": [],
        "reward": 0.0,
        "extra": {},
        "turns": [],
    }
    assert [p.name for p in (tmp_path / "eval_results").iterdir()] == ["eval_step_3.json"]
    assert result.delta_vs_step0 is None  # there was no step 0


def test_another_evaluation_is_not_compared_with(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    evaluate(tmp_path, Adder(), 0)
    assert evaluate(tmp_path, Adder(), 1, eval_temperature=0.3).delta_vs_step0 is None
    assert "another temperature" in caplog.text
    fewer = Evaluator(configure(), PROBLEMS[:50], Adder(), tmp_path).run(2, greedy=False)
    assert fewer.delta_vs_step0 is None
    (tmp_path / "eval_results" / "eval_step_0.json").write_text("{")
    assert evaluate(tmp_path, Adder(), 3).delta_vs_step0 is None
    assert "can't be read" in caplog.text


def test_an_answer_that_could_not_be_scored_is_wrong(tmp_path: Path):
    class Hanging(Adder):
        def _rollout(
            self, problem: Problem, sampling: SamplingParams, seed_parts: tuple, sample: int
        ) -> Rollout:
            rollout = super()._rollout(problem, sampling, seed_parts, sample)
            failed = Score(reward=0.0, parts={}, answer=None, failure="timeout")
            return Rollout(
                prompt_ids=rollout.prompt_ids,
                turns=(Turn(completion=rollout.completion),),
                text=rollout.text,
                score=failed if problem.task == "others" else rollout.score,
            )

    result = evaluate(tmp_path, Hanging(skill=1.0), 0)
    assert result.accuracy.mean == 0.6
    assert result.num_failures == 40
    assert "40 answers" in headline(result)


def test_gold_answers_for_a_reader():
    assert plain_answer("3/4") == "3/4"
    assert plain_answer(12) == "12"
    assert plain_answer({"answer": "42", "metadata": {}}) == "42"
    assert plain_answer({"numbers": [1, 2], "target": 3}) is None
    assert plain_answer(["a", "b"]) is None


def test_a_row_of_metrics(tmp_path: Path):
    result = evaluate(tmp_path, Adder(skill=0.5), 0, greedy=True, eval_samples_per_problem=2)
    log = MetricsLog(tmp_path, build({}))
    log.log_eval(0, result.metrics())
    log.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["accuracy"] == row["pass@1"] == result.accuracy.mean
    assert row["pass@2"] == result.pass_at_k[2]
    assert row["accuracy/others"] == result.per_task["others"].accuracy.mean
    assert row["greedy_accuracy"] == 0.0


def test_what_the_terminal_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    evaluate(tmp_path, Adder(skill=0.0), 0)
    result = evaluate(tmp_path, Adder(skill=1.0), 8)
    assert headline(result) == (
        "accuracy 100.0 % [96.3, 100.0] on 100 problems at temperature 0.8; "
        "+100.0 points since step 0 [+94.2, +100.0], p < 0.001"
    )
    out = io.StringIO()
    print_result(result, num_examples=2, console=Console(file=out, width=100))
    text = out.getvalue()
    assert "Evaluation at step 8" in text
    assert [line.split() for line in text.splitlines() if line.strip().startswith("others")] == [
        ["others", "40", "100.0", "[91.2,", "100.0]", "+100.0", "18"]
    ]
    assert text.count("question") == 2
    assert caplog.messages == [f"Evaluation at step 8: {headline(result)}"]
    assert "What is 0 + 0?" in text and "right   answer 0   gold 0   (18 tokens)" in text


def test_episodes_are_printed_as_conversations(tmp_path: Path):
    result = evaluate(tmp_path, Adder(skill=1.0), 0)
    turns = [
        {"role": "assistant", "content": "print(1)"},
        {"role": "tool", "name": "python\x1b[2J", "content": "1"},
    ]
    episodes = [replace(record, turns=(*turns * 5, turns[0])) for record in result.completions]
    out = io.StringIO()
    print_result(replace(result, completions=episodes), num_examples=1, console=Console(file=out, width=100))
    text = out.getvalue()
    assert text.count("print(1)") == 4 and text.count("tool python\\x1b[2J") == 4
    assert "completion" not in text and "and 3 messages more" in text and "\x1b[2J" not in text


def test_what_a_constant_earns_stands_beside_the_accuracy(tmp_path: Path):
    """As measured with default settings, so for those alone."""
    tasks = ("syllogism", "reasoning_gym/maze", "chain_sum", "spell_backward")
    problems = [sum_problem(i, task=task) for i in range(10) for task in tasks]
    specs = {task: {} for task in tasks} | {"chain_sum": {"config": {"max_terms": 2}}}
    result = Evaluator(configure(datasets=specs), problems, Adder(skill=1.0), tmp_path).run(0, greedy=False)
    rates = [measured()["tasks"][name]["rate"] for name in ("syllogism", "maze")]
    assert rates == [0.71, 0.305]  # of the table that is shipped
    document = json.loads((tmp_path / "eval_results" / "eval_step_0.json").read_text())
    per_task = document["summary"]["per_task"]
    assert [per_task[task]["constant"] for task in tasks] == [*rates, None, None]
    out = io.StringIO()
    print_result(result, num_examples=0, console=Console(file=out, width=100))
    shown = {line.split()[0]: line.split()[-2] for line in out.getvalue().splitlines() if "100.0]" in line}
    assert shown == {
        "Evaluation": "temperature",
        "syllogism": "71",
        "reasoning_gym/maze": "30",
        "chain_sum": "100.0]",
        "spell_backward": "100.0]",
    }
    alone = [sum_problem(i, task="syllogism") for i in range(10)]
    single = configure(datasets={"syllogism": {}})
    result = Evaluator(single, alone, Adder(skill=1.0), tmp_path).run(1, greedy=False)
    assert "(a constant earns 71 %) on 10 problems" in headline(result)


def test_examples_are_the_same_problems_every_time(tmp_path: Path):
    early, late = (evaluate(tmp_path, Adder(skill=s), 0, eval_samples_per_problem=2) for s in (0.1, 0.9))
    assert [a.problem for a in examples(early, 4)] == [a.problem for a in examples(late, 4)]
    assert [a.problem for a in examples(early, 4)] == [PROBLEMS[i].id for i in (0, 25, 50, 75)]
    assert examples(early, 0) == []
    assert len(examples(early, 1000)) == 100


def test_long_and_hostile_texts_are_shown_as_they_are(tmp_path: Path):
    problem = Problem(
        id="x/eval/0",
        task="x",
        messages=({"role": "user", "content": "[bold]a[/bold] [/oops] " + "z" * 999},),
        answer="1",
    )
    result = Evaluator(configure(), [problem], Adder(skill=1.0), tmp_path).run(0, greedy=False)
    out = io.StringIO()
    print_result(result, num_examples=1, console=Console(file=out, width=1000))
    assert "[bold]a[/bold] [/oops] zz" in out.getvalue()
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) < 450


def test_an_example_is_printed_again_when_its_answer_changed(tmp_path: Path):
    for step, (skill, told) in enumerate(((0.0, 2), (0.0, 0), (1.0, 2))):
        out = io.StringIO()
        result = evaluate(tmp_path, Adder(skill=skill), step)
        print_result(result, num_examples=2, console=Console(file=out, width=100))
        assert out.getvalue().count("question") == told
        assert "unchanged" not in result.summary()
