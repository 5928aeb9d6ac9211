"""The report, on run folders written by the real configuration, metrics log and evaluator."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from whetstone.config.load import build, dump
from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.diagnosis.history import Severity
from whetstone.engines.base import SamplingParams
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import EvalResult, Evaluator
from whetstone.files import atomic_write
from whetstone.report import write_report
from whetstone.report.data import MAX_BYTES, MAX_ROWS, page_data
from whetstone.report.examples import pairs
from whetstone.report.page import findings, page
from whetstone.report.read import read_run
from whetstone.run.metrics import MetricsLog
from whetstone.seeds import seed, uniforms
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn

TASKS = ("chain_sum", "basic_arithmetic", "products")
PROBLEMS = [
    Problem(
        id=f"{TASKS[i % 3]}/eval/{i:06d}",
        task=TASKS[i % 3],
        messages=(
            {"role": "system", "content": "Think, then answer."},
            {"role": "user", "content": f"State the final answer: {13 + i} {'+*-'[i % 3]} {7 + i % 5} < & ?"},
        ),
        answer=str(eval(f"{13 + i} {'+*-'[i % 3]} {7 + i % 5}")),
    )
    for i in range(240)
]


@dataclass
class Pupil:
    """A policy that guesses or thinks, with a given chance; it gets right what it thinks about."""

    thinking: float

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        return [
            Group(
                problem=p,
                rollouts=tuple(self._answer(p, sampling, (*seed_parts, p.id, n)) for n in range(num_samples)),
            )
            for p in problems
        ]

    def _answer(self, problem: Problem, sampling: SamplingParams, parts: tuple[int | str, ...]) -> Rollout:
        manner, luck = uniforms(seed(*parts), 0, 2)
        thinks = manner < self.thinking if sampling.temperature > 0 else self.thinking > 0.5
        hard = problem.task == "products"
        right = luck < ((0.75 if hard else 0.97) if thinks else 0.12)
        answer = problem.answer if right else str(int(problem.answer) + 1 + int(5 * luck))
        sums = problem.question.removeprefix("State the final answer: ")
        work = f"{sums} is worked out\nstep by step: {answer}"
        text = f"<think>{work if thinks else ''}</think>\n<answer>{answer}</answer>"
        tokens = tuple(text.encode())
        completion = Completion(
            token_ids=tokens, logprobs=(-0.1,) * len(tokens), finish=Finish.STOP, policy_version=0
        )
        score = Score(reward=float(right), parts={"correct": float(right), "format": 1.0}, answer=answer)
        return Rollout(prompt_ids=(1,), turns=(Turn(completion=completion),), text=text, score=score)


def thinking_at(step: int, num_steps: int) -> float:
    return 0.2 + 0.75 * min(1.0, 1.6 * step / max(1, num_steps)) ** 1.5


def train_row(step: int, num_steps: int) -> dict[str, float]:
    share = thinking_at(step, num_steps)
    noise = uniforms(seed("noise", step), 0, 8) - 0.5
    accuracy = 0.12 + 0.78 * share + 0.1 * noise[0]
    times = {
        "time/rollout": 2.1 + 2 * share + 0.3 * noise[1],
        "time/reward_wait": 0.15,
        "time/weight_sync": 0.3,
        "time/update": 1.4 + share + 0.2 * noise[2],
    }
    if step % 20 == 0:
        times["time/eval"] = 3.2
    return {
        "reward": accuracy + 0.5, "reward_std": 0.4, "rewards/accuracy/mean": accuracy,
        "rewards/format/mean": 0.5 + 0.01 * noise[3], "rewards/correct/mean": accuracy, "accuracy": accuracy,
        "kl": 0.0, "entropy": 0.45 - 0.3 * share + 0.03 * noise[4], "loss": 0.01 * noise[5],
        "grad_norm": 0.8 + 0.5 * noise[6], "learning_rate": 1e-4, "clip_ratio/region_mean": 0.004 * share,
        "completions/mean_length": 30 + 60 * share + 4 * noise[7], "completions/max_length": 120.0,
        "completions/clipped_ratio": 0.0,
        "frac_reward_zero_std": 0.2 + 0.4 * share, "frac_answers_identical": 0.15 + 0.35 * share, **times,
        "step_time": sum(times.values()) + 0.05, "tokens_per_s": 2400 + 500 * noise[1], "skipped_steps": 0.0,
        "scoring_failures": 0.0, "update_tokens_per_s": 9000.0, "mfu": 0.4 + 0.01 * noise[1],
        "peak_memory_gb": 31.0 + 0.25 * (step == 3),
    }  # fmt: skip


def make_run(folder: Path, *, num_steps: int = 12, evals: tuple[int, ...] | None = None, **flat) -> Path:
    """A run folder as `whet train` leaves it; `evals` are the steps with an evaluation."""
    config = build(
        {
            "run_name": "quick <start>", "model_name_or_path": "pebble",
            "max_steps": max(1, num_steps), "max_completion_length": 128,
            "datasets": {name: {"weight": 1.0, "config": {"max_terms": 3}} for name in TASKS}, **flat,
        }
    )  # fmt: skip
    evals = tuple(sorted({0, num_steps // 3, 2 * num_steps // 3, num_steps})) if evals is None else evals
    atomic_write(folder / "config.yaml", dump(config))
    log = MetricsLog(folder, config)
    results: dict[int, EvalResult] = {}
    for step in range(num_steps + 1):
        if step:
            log.log(step, train_row(step, num_steps))
        if step in evals:
            policy = Pupil(thinking_at(step, num_steps))
            results[step] = Evaluator(config, PROBLEMS, policy, folder).run(
                step, greedy=step in (0, num_steps)
            )
            log.log_eval(step, results[step].metrics())
    log.close()
    if num_steps in results:
        before, after = results[evals[0]].summary(), results[num_steps].summary()
        ended = {
            "accuracy_before": before["accuracy"],
            "accuracy_after": after["accuracy"],
            "seconds": 271.0,
            "steps": num_steps,
        }
        atomic_write(folder / "train_results.json", json.dumps(ended))
    return folder


class _Page(HTMLParser):
    """Checks that tags nest, and collects the text and the addresses a browser would fetch."""

    VOID = frozenset(("meta", "br", "hr", "img", "link", "path", "use", "rect", "circle"))

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.feed(document)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)
            if key == "id" and value:
                self.ids.append(value)
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        void, self.VOID = self.VOID, frozenset((tag,))
        self.handle_starttag(tag, attrs)
        self.VOID = void

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open and self.open[-1] not in ("style", "script") else ""


def report(folder: Path) -> _Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return _Page(path.read_text(encoding="utf-8"))


def html(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def titles(folder: Path) -> list[str]:
    return [finding.title for finding in findings(read_run(folder))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("whole"), num_steps=30)
    assert write_report(folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def shown(whole: Path) -> _Page:
    return _Page(html(whole))


def test_the_headline_has_the_numbers_of_the_evaluations(whole: Path, shown: _Page):
    text = shown.text
    first, last = (
        json.loads((whole / "eval_results" / f"eval_step_{step}.json").read_text())["summary"]
        for step in (0, 30)
    )
    before, after, versus = first["accuracy"], last["accuracy"], last["delta_vs_step0"]
    for label, share in (("Before, step 0", before), ("After, step 30", after)):
        mean, low, high = (f"{100 * share[key]:.1f}" for key in ("mean", "low", "high"))
        assert f"{label}{mean} %95 %: {low} to {high}" in text
    assert f"+{100 * (after['mean'] - before['mean']):.1f} points" in text
    assert versus["p_value"] < 1e-20 and re.search(r"p < 10\N{MINUS SIGN}\d\d, paired over problems", text)
    assert "240 fixed problems that are not trained on, sampled at temperature 1" in text
    assert f"Greedy: {100 * first['greedy_accuracy']['mean']:.1f} %" in text
    assert "pebble" in text and "chain_sum, basic_arithmetic, products" in text
    assert "30 steps" in text and "4 min 31 s" in text


def test_one_file_that_fetches_nothing(whole: Path, shown: _Page):
    found, document = shown, html(whole)
    assert found.fetched == []
    assert "@import" not in document and "url(http" not in document
    assert len(document) < 700_000
    assert len(found.ids) == len(set(found.ids)) and found.scripts == 2  # the data and the components
    assert (
        "unsafe" not in document.split("<style>")[0] and "import " not in document.split('type="module"')[1]
    )


def read_data(document: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', document)
    return json.loads(text)


def test_the_page_holds_the_numbers_of_the_files(whole: Path):
    data = read_data(html(whole))
    columns, rows = data["changes"]["columns"], read_run(whole).rows
    assert columns["step"][:30] == list(range(1, 31)) and columns["kind"][30:] == ["eval"] * 4
    assert columns["reward"][:30] == pytest.approx([row["reward"] for row in rows], rel=1e-5)
    documents = {
        step: json.loads((whole / "eval_results" / f"eval_step_{step}.json").read_text())
        for step in (0, 10, 20, 30)
    }
    shares = [document["summary"]["accuracy"]["low"] for document in documents.values()]
    assert columns["accuracy_low"][30:] == pytest.approx(shares, rel=1e-5)
    for step in (0, 30):
        assert data["documents"][f"tasks/{step}"] == documents[step]["summary"]["per_task"]
    problem = PROBLEMS[7].id
    entries = data["documents"][f"problems/{problem}"]["entries"]
    expected = [
        sum(row["correct"] for row in document["completions"] if row["problem"] == problem)
        for document in documents.values()
    ]
    assert [entry["right"] for entry in entries] == expected


def test_a_long_run_makes_no_large_page(tmp_path: Path):
    make_run(tmp_path, num_steps=3, evals=(0, 3))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({**row, "kind": "train", "step": step}) + "\n" for step in range(4, 5001))
    (tmp_path / "completions").mkdir()
    long = {"problem": "p", "reward": 0.0, "messages": [], "completion": "<" * 1_000_000}
    with (tmp_path / "completions" / "step_3.jsonl").open("w") as file:
        file.writelines(json.dumps({**long, "sample": n}) + "\n" for n in range(3))
    data = page_data(read_run(tmp_path))
    steps = data["changes"]["columns"]["step"][:-2]
    assert len(steps) <= MAX_ROWS + 1 and steps[0] == 1 and steps[-1] == 5000
    minutes = data["changes"]["columns"]["minutes"][len(steps) - 1]
    assert minutes == pytest.approx(sum(row["step_time"] for row in read_run(tmp_path).rows) / 60, rel=1e-5)
    completions = data["documents"]["completions/3"]
    assert len(completions) == 3 and len(json.dumps(completions)) < MAX_BYTES
    assert len(completions[0]["completion"]) < 5000


def test_the_same_run_gives_the_same_page(whole: Path):
    assert page(read_run(whole)) == html(whole)


def test_completions_cannot_inject_markup(whole: Path, shown: _Page):
    found, document = shown, html(whole)
    assert "<think>" not in document and "<answer>" not in document  # they are there, escaped
    assert "\\u003cthink\\u003e" in document
    assert "<think>" in found.text and "quick <start>" in found.text
    assert "< & ?" in found.text


HOSTILE = (
    "</pre></div><script>document.title='owned'</script><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="\'><a href="javascript:alert(1)">click</a>',
    "<style>*{display:none}</style><!-- <iframe srcdoc='<p>'></iframe> <svg onload=alert(1)>",
    "\u202eright to left\u2066 zero\u200bwidth \x1b]0;title\x07 \x00 \ud800 &lt;b&gt; ]]> ${x}",
)


def test_nothing_a_model_wrote_becomes_markup(tmp_path: Path):
    """Hostile completions, questions, gold answers and task names: the page has the same elements without."""
    make_run(tmp_path, num_steps=3, evals=(0, 3))
    expected = Counter(re.findall(r"<[a-z]+", page(read_run(tmp_path))))
    for path in (tmp_path / "eval_results").glob("eval_step_*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        for i, answered in enumerate(document["completions"]):
            text = HOSTILE[i % len(HOSTILE)]
            answered |= {"completion": text, "answer": text, "gold": text}
            answered["messages"][-1]["content"] = text
        path.write_text(json.dumps(document), encoding="utf-8")
    found = report(tmp_path)
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert Counter(re.findall(r"<[a-z]+", document)) == expected
    assert found.fetched == [] and "default-src 'none'" in document
    assert found.text.count("owned") >= 2 and "javascript:alert(1)" in found.text  # there, as text
    assert "\\u202eright to left\\u2066" in found.text and "\\ud800" in found.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\x00\x07\x1b]", document)


def test_episodes_are_shown_as_conversations(tmp_path: Path):
    """With all their turns, and as text: a tool repeats what the model wrote."""
    make_run(tmp_path, num_steps=3, evals=(0, 3))
    plain = Counter(re.findall(r"<[a-z]+", page(read_run(tmp_path))))
    for path in (tmp_path / "eval_results").glob("eval_step_*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        for answered in document["completions"]:
            answered["turns"] = [
                {"role": "assistant", "content": HOSTILE[0]},
                {"role": "tool", "name": HOSTILE[1], "content": f"printed {HOSTILE[2]}"},
                {"role": "user", "content": "from a game"},
                None,
                {"role": "assistant", "content": "the last turn"},
            ]
        path.write_text(json.dumps(document), encoding="utf-8")
    found = report(tmp_path)
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    added = Counter(re.findall(r"<[a-z]+", document)) - plain
    assert set(added) == {"<div", "<pre"}
    num_sides = document.count('class="turn observed"') // 2
    assert num_sides > 1 and added == {"<div": 8 * num_sides, "<pre": 3 * num_sides}
    assert found.fetched == []
    assert "the last turn" in found.text and "environment" in found.text and "printed <style>" in found.text


def test_examples_are_the_same_problem_before_and_after(whole: Path):
    found = pairs(read_run(whole))
    assert [pair.kind for pair in found][:4] == ["wrong, then right"] * 3 + ["wrong, and still wrong"]
    for pair in found:
        (step, before), (later, after) = pair.sides
        assert (step, later) == (0, 30)
        assert before["problem"] == after["problem"]
        assert ("right" if before["correct"] else "wrong") == pair.kind.split(",")[0]
        assert after["correct"] == pair.kind.endswith("right")
    assert len({pair.sides[0][1]["task"] for pair in found[:3]}) == 3  # tasks take turns


def test_a_good_run_has_nothing_to_warn_of(whole: Path):
    assert titles(whole) == []


def test_a_run_that_is_still_going(tmp_path: Path):
    make_run(tmp_path, num_steps=9, evals=(0, 3), max_steps=60)
    text = report(tmp_path).text
    assert "made at step 9 of 60" in text and "After, step 3" in text


def test_a_first_evaluation_and_no_other(tmp_path: Path):
    make_run(tmp_path, num_steps=2, evals=(0,))
    text = report(tmp_path).text
    assert titles(tmp_path) == ["Not finished yet", "One evaluation only"]
    assert "Accuracy, step 0" in text and "What the policy answers so far." in text
    assert "points" not in text.split("How it went")[0]


def test_a_run_without_evaluation(tmp_path: Path):
    make_run(tmp_path, num_steps=3, evals=())
    text = report(tmp_path).text
    assert "No evaluation" in titles(tmp_path)
    reward = train_row(1, 3)["reward"]
    assert f"Reward at the first step{reward:.2f}" in text


def test_one_step_and_nothing_else(tmp_path: Path):
    make_run(tmp_path, num_steps=1, evals=())
    assert "1 step " in report(tmp_path).text.replace("\xa0", " ")


def test_an_evaluation_and_no_step(tmp_path: Path):
    make_run(tmp_path, num_steps=0, evals=(0,))
    (tmp_path / "train_results.json").unlink()
    text = report(tmp_path).text
    assert "Accuracy, step 0" in text and titles(tmp_path) == []


def test_several_samples_show_pass_at_k(tmp_path: Path):
    make_run(tmp_path, num_steps=4, evals=(0, 4), eval_samples_per_problem=4)
    ends = [
        json.loads((tmp_path / "eval_results" / f"eval_step_{n}.json").read_text())["summary"] for n in (0, 4)
    ]
    told = " → ".join(f"{100 * end['pass_at_k']['4']:.1f} %" for end in ends)
    text = report(tmp_path).text
    assert f"pass@4 {told}" in text and "4 samples each" in text


def test_broken_files_beside_good_ones_are_passed_over(tmp_path: Path):
    make_run(tmp_path, num_steps=3)
    (tmp_path / "eval_results" / "eval_step_1.json").write_text("{")
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "train_results.json").write_text("")
    assert "After, step 3" in report(tmp_path).text


def test_warnings_worth_knowing(tmp_path: Path):
    make_run(tmp_path, num_steps=0, evals=(0,))
    log = MetricsLog(tmp_path, build({}))
    for step in range(1, 11):
        bad = {
            "completions/clipped_ratio": 0.5,
            "frac_reward_zero_std": 1.0,
            "accuracy": 0.04,
            "scoring_failures": 2.0,
        }
        log.log(
            step, {"reward": 0.0, **bad, "skipped_steps": float(step in (3, 7)), "entropy": 2.0 / step**2}
        )
    log.close()
    (tmp_path / "train_results.json").write_text("{}")
    said = [verdict for verdict in diagnose(*load_history(tmp_path)) if verdict.severity is not Severity.NOTE]
    assert len(said) >= 5
    assert titles(tmp_path) == ["One evaluation only", *(verdict.title for verdict in said)]
    text = report(tmp_path).text
    assert "50 % of the recent completions reached max_completion_length" in text
    assert "2 steps had a loss or gradient that was not finite" in text
    assert "on 20 answers in training" in text
    assert "Only 0 % of the recent prompts" in text and "raise num_generations" in text


def test_a_change_that_may_be_chance_is_called_that(tmp_path: Path):
    config = build({})
    for step, thinking in ((0, 0.5), (5, 0.52)):
        Evaluator(config, PROBLEMS[:60], Pupil(thinking), tmp_path).run(step, greedy=False)
    assert titles(tmp_path) == ["The change may be chance"]


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"metrics\.jsonl.*eval_results"):
        write_report(tmp_path)
