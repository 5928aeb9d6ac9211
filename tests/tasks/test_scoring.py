"""The scoring pool: order, sums, hangs, deaths, functions of the user's own, and the limit of failures."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from whetstone.config import Config, build, make_plan
from whetstone.errors import UserError
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import Job, ScoringProcess, ScoringRequest
from whetstone.types import Outcome, Problem

OWN = Path(__file__).parents[1] / "data" / "own_rewards.py"
# A real one: math-verify tries to work out a number of 10^(10^8) digits.
HANGS = r"\boxed{9^{9^{9^{9}}}}"


def answer(problem: Problem, text: str, num_tokens: int = 3) -> ScoringRequest:
    return ScoringRequest(
        problem=problem, text=text, completion_ids=tuple(range(num_tokens)), truncated=False
    )


def countdown(target: int, split: str = "train") -> Problem:
    given = {"numbers": (5, 7, 30), "target": target}
    messages = ({"role": "user", "content": f"make {target}"},)
    return Problem(id=f"countdown/{split}/{target:06d}", task="countdown", messages=messages, answer=given)


def configure(**keys) -> Config:
    return build({"datasets": {"countdown": {}}, "reward_workers": 1, "eval_num_samples": 0, **keys})


@pytest.fixture(scope="module")
def plain() -> Iterator[Scorer]:
    with Scorer(configure(reward_workers=2, reward_weights=[2.0, 0.5])) as scorer:
        yield scorer


def test_scores_come_in_the_order_of_submission_with_weighted_sums(plain: Scorer):
    full = "<think>a</think><answer>{}</answer>"
    for n in range(100):
        plain.submit(answer(countdown(30 + n % 3), full.format("30 + 7 - 5" if n % 2 else "nothing")))
    scores = plain.gather()
    assert len(scores) == 100 and plain.failures == 0
    for n, score in enumerate(scores):
        correct = n % 2 == 1 and n % 3 == 2  # 30 + 7 - 5 = 32
        accuracy = 1.0 if correct else 0.1 if n % 2 else 0.0
        assert score.parts == {"correct": float(correct), "accuracy": accuracy, "format": 1.0}
        assert score.reward == pytest.approx(2.0 * accuracy + 0.5)
        assert score.answer == ("30 + 7 - 5" if n % 2 else "nothing")


def test_gather_starts_afresh(plain: Scorer):
    assert plain.gather() == []
    plain.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
    (score,) = plain.gather()
    assert score.reward == 2.0 + 0.5 * 0.5  # two of four tags
    assert plain.gather() == []


def test_the_same_answer_to_the_same_problem_is_scored_once(monkeypatch: pytest.MonkeyPatch):
    sent: list[int] = []
    send = ScoringProcess.send_job

    def record(self: ScoringProcess, job: Job, *rest: Any) -> None:
        sent.extend(job.numbers if job.kind == "score" else ())
        send(self, job, *rest)

    monkeypatch.setattr(ScoringProcess, "send_job", record)
    config = configure(
        reward_funcs=["accuracy", "length", f"{OWN}:logs"], max_completion_length=8, overlong_buffer_length=4
    )
    first, second = countdown(32), countdown(33)
    right = "<think>a</think><answer>30 + 7 - 5</answer>"
    answers = [(first, right, 3), (first, "hm", 3), (first, right, 3), (second, right, 3), (first, right, 8)]
    with Scorer(config) as scorer:
        for _ in range(2):  # nothing is left of the first batch
            for problem, text, num_tokens in answers:
                scorer.submit(answer(problem, text, num_tokens))
            scores = scorer.gather()
            assert sorted(sent) == [0, 1, 3, 4]
            assert [score.parts["correct"] for score in scores] == [1.0, 0.0, 1.0, 0.0, 1.0]
            assert scores[2] == scores[0] and scores[4].parts["length"] < scores[0].parts["length"]
            assert scorer.custom_metrics == {"texts": [5]}  # functions of the user's own get all of them
            sent.clear()


def test_episodes_of_equal_text_are_scored_by_their_own_outcomes(plain: Scorer):
    problem = countdown(32)
    for reward in (1.0, 0.25):
        outcome = Outcome(reward=reward, correct=reward == 1.0, last="won")
        plain.submit(replace(answer(problem, "<answer>30 + 7 - 5</answer>"), outcome=outcome))
    scores = plain.gather()
    assert [score.parts["accuracy"] for score in scores] == [1.0, 0.25]
    assert [score.parts["correct"] for score in scores] == [1.0, 0.0]
    assert [score.answer for score in scores] == ["won", "won"]


def test_evaluation_problems_are_scored_by_the_evaluation_task():
    config = configure(
        datasets={"countdown": {}}, eval_datasets={"countdown": {"config": {"use_all_numbers": True}}}
    )
    with Scorer(config) as scorer:
        scorer.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
        scorer.submit(answer(countdown(35, "eval"), "<answer>30 + 5</answer>"))
        assert [score.parts["correct"] for score in scorer.gather()] == [1.0, 0.0]


def test_prefix_and_length_are_part_of_the_reward():
    config = configure(
        reward_funcs=["format", "length"],
        assistant_prefix="<think>",
        overlong_buffer_length=10,
        max_completion_length=40,
    )
    with Scorer(config) as scorer:
        scorer.submit(answer(countdown(35), "so</think><answer>1</answer>", num_tokens=35))
        (score,) = scorer.gather()
    assert score.parts == {"correct": 0.0, "format": 1.0, "length": -0.5}
    assert score.reward == 0.5


def math_config(tmp_path: Path, **keys) -> Config:
    (tmp_path / "rows.json").write_text(json.dumps([{"question": f"q{n}", "answer": "3"} for n in range(4)]))
    return configure(datasets={"math": {"config": {"path": str(tmp_path / "rows.json")}}}, **keys)


def test_math_alone_pays_for_the_answer_and_not_for_tags(tmp_path: Path):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"question": f"q{n}", "answer": "3"} for n in range(4)]))
    config = build(
        {"datasets": {"math": {"config": {"path": str(rows)}}}, "eval_num_samples": 0, "reward_workers": 1}
    )
    assert config.tasks.reward_funcs == ["accuracy"]
    problem = build_tasks(config, "train").problem(0)
    texts = (
        "<think>a</think><answer>3</answer>",
        "<think>a</think><answer>4</answer>",
        "<think></think><answer></answer>",
    )
    with Scorer(config) as scorer:
        for text in texts:
            scorer.submit(answer(problem, text))
        assert [score.reward for score in scorer.gather()] == [1.0, -1.0, -0.5]


@pytest.mark.parametrize(
    ("keys", "rewards"),
    [
        ({"datasets": {"chain_sum": {}}}, ["accuracy", "format"]),
        ({"datasets": {"countdown": {}}}, ["accuracy", "format"]),
        ({"datasets": {"math/gsm8k": {"config": {"path": "x"}}}}, ["accuracy"]),
        ({"datasets": {"code": {"config": {"path": "x"}}}}, ["accuracy"]),
        ({"datasets": {"math": {"config": {"path": "x"}}, "chain_sum": {}}}, ["accuracy", "format"]),
        (
            {"datasets": {"math": {"config": {"path": "x"}}}, "developer_prompt": "DeepSeekZero"},
            ["accuracy", "format"],
        ),
        (
            {"datasets": {"math": {"config": {"path": "x"}}}, "reward_funcs": ["accuracy", "format"]},
            ["accuracy", "format"],
        ),
    ],
)
def test_format_is_paid_by_default_only_where_prompts_ask_for_tags(keys: dict, rewards: list[str]):
    config = build(keys)
    assert config.tasks.reward_funcs == rewards
    paid = make_plan(config, num_problems=100).lines(config)
    assert f"rewards: {', '.join(f'{name} (1.0)' for name in rewards)}" in paid


def test_an_answer_that_hangs_math_verify_costs_its_own_score_only(tmp_path: Path):
    config = math_config(tmp_path, reward_timeout_s=1.0, reward_funcs=["accuracy"])
    problem = build_tasks(config, "train").problem(0)
    with Scorer(config) as scorer:
        scorer.submit(answer(problem, r"\boxed{3}"))
        assert scorer.gather()[0].reward == 1.0  # the worker is up: what follows is the time of scoring
        began = time.monotonic()
        for text in (r"\boxed{3}", HANGS, r"\boxed{x+1-x+2}", "nothing", HANGS):
            scorer.submit(answer(problem, text))
        scores = scorer.gather()
        assert time.monotonic() - began < 30
        assert [score.parts["correct"] for score in scores] == [1.0, 0.0, 1.0, 0.0, 0.0]
        assert [score.failure for score in scores] == [None, "timeout", None, None, "timeout"]
        # Hanging pays no better than being wrong (-1), or a policy would learn to hang.
        assert [score.reward for score in scores] == [1.0, -1.0, 1.0, -0.5, -1.0]
        assert scorer.failures == 2
        scorer.submit(answer(problem, r"\boxed{3}"))
        assert scorer.gather()[0].reward == 1.0 and scorer.failures == 0


def test_functions_of_the_users_own_are_added_by_name():
    config = configure(
        reward_funcs=["accuracy", f"{OWN}:slow_but_async", f"{OWN}:length_of_text", f"{OWN}:logs"],
        reward_weights=[1.0, 2.0, 0.01, 1.0],
    )
    with Scorer(config) as scorer:
        scorer.submit(answer(countdown(35), "<answer>30 + 5</answer>", num_tokens=4))
        scorer.submit(answer(countdown(35), "hm", num_tokens=5))
        right, wrong = scorer.gather()
        assert right.parts == {
            "correct": 1.0,
            "accuracy": 1.0,
            "slow_but_async": -0.04,  # the row has no solution of its own to compare with
            "length_of_text": 23.0,
            "logs": 0.0,
        }
        assert right.reward == pytest.approx(1.0 + 2.0 * -0.04 + 0.23)
        assert wrong.reward == pytest.approx(2.0 * -0.05 + 0.02)
        assert scorer.custom_metrics == {"texts": [2.0]}
        assert [score.extra for score in (right, wrong)] == [{"first_letter": "<"}, {"first_letter": "h"}]


def test_none_is_left_out_and_columns_a_task_lacks_are_none():
    config = configure(
        datasets={"countdown": {}, "gcd": {}}, reward_funcs=["accuracy", f"{OWN}:only_countdown"]
    )
    gcd = build_tasks(config, "train").tasks["gcd"]
    with Scorer(config) as scorer:
        scorer.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
        scorer.submit(answer(gcd.problem(0), gcd.gold(gcd.problem(0)) or ""))
        ours, theirs = scorer.gather()
    assert ours.parts["only_countdown"] == 35.0 and ours.reward == 36.0
    assert theirs.parts == {"correct": 1.0, "accuracy": 1.0} and theirs.reward == 1.0


@pytest.mark.parametrize(
    ("word", "failure"),
    [
        ("hang", "timeout"),
        ("die", "crash"),
        ("raise", "error: KeyError: 'no such thing' (own_rewards.py, line "),
    ],
)
def test_a_function_that_hangs_dies_or_raises_costs_the_guilty_answer_only(word: str, failure: str):
    config = configure(reward_funcs=["accuracy", f"{OWN}:sometimes_bad"], reward_timeout_s=1.0)
    with Scorer(config) as scorer:
        for text in ("fine", word, "<answer>30 + 5</answer>"):
            scorer.submit(answer(countdown(35), text))
        scores = scorer.gather()
    assert (scores[1].failure or "").startswith(failure)  # with the line that raised
    assert [score.failure is None for score in scores] == [True, False, True]
    assert [score.reward for score in scores] == [1.0, 0.0, 2.0]
    assert scorer.failures == 1
    assert "sometimes_bad" not in scores[1].parts and scores[1].parts["correct"] == 0.0


def test_too_many_failures_stop_the_run_with_the_reason():
    config = configure(reward_funcs=["accuracy", f"{OWN}:sometimes_bad"], max_reward_failure_fraction=0.5)
    with Scorer(config) as scorer:
        for n in range(8):
            scorer.submit(answer(countdown(35), "raise" if n < 5 else "fine"))
        with pytest.raises(UserError, match=r"5 of 8.*KeyError: 'no such thing'.*'raise'"):
            scorer.gather()
        for n in range(8):
            scorer.submit(answer(countdown(35), "raise" if n < 4 else "fine"))
        assert sum(score.failure is not None for score in scorer.gather()) == 4  # half is allowed


def test_a_worker_killed_from_outside_is_replaced(plain: Scorer):
    for worker in plain._workers:
        worker.process.process.send_signal(signal.SIGKILL)
    for _ in range(20):
        plain.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
    assert [score.parts["correct"] for score in plain.gather()] == [1.0] * 20


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_whose_server_was_killed_are_replaced(plain: Scorer):
    server = psutil.Process(plain._workers[0].process.process.pid).parent()
    assert server is not None and "fork_server" in " ".join(server.cmdline())
    server.kill()
    with Scorer(configure()) as another:  # at once: the server may not be known to be dead
        for scorer in (another, plain):
            for _ in range(20):
                scorer.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
            assert [score.parts["correct"] for score in scorer.gather()] == [1.0] * 20


def test_answers_of_a_worker_that_hangs_are_scored_again_one_by_one():
    """Its results may be scored and not sent, so nobody knows which answer it hangs on."""
    with Scorer(configure(reward_workers=2, reward_timeout_s=1.0)) as scorer:
        scorer.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
        scorer.gather()  # the workers are up
        for worker in scorer._workers:
            forks = psutil.Process(worker.process.process.pid).children(recursive=True)
            for process in (psutil.Process(worker.process.process.pid), *forks):
                process.suspend()
        scorer._polled_at = math.inf  # all are sent together
        for n in range(20):
            scorer.submit(answer(countdown(35), f"<answer>30 + {n}</answer>"))
        scores = scorer.gather()
        assert scorer.failures == 0
        assert [n for n, score in enumerate(scores) if score.parts["correct"]] == [5]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"reward_funcs": ["acuracy"]}, "'acuracy'.*'accuracy'"),
        ({"reward_funcs": ["absent.py:f"]}, r"absent\.py"),
        ({"reward_funcs": ["accuracy", "accuracy"]}, "reward_funcs.*'accuracy'"),
        ({"reward_funcs": ["length"]}, "overlong_buffer_length"),
    ],
)
def test_reward_functions_that_cannot_be_are_refused_at_once(keys: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        Scorer(configure(**keys))


def test_a_reward_file_that_cannot_be_loaded_is_named(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import no_such_module\n\ndef f(**kwargs):\n    return []\n")
    with Scorer(configure(reward_funcs=[f"{tmp_path}/broken.py:f"])) as scorer:
        scorer.submit(answer(countdown(35), "x"))
        with pytest.raises(UserError, match="ModuleNotFoundError"):
            scorer.gather()


def test_close_leaves_no_process_behind():
    scorer = Scorer(configure(reward_workers=2))
    ids = [worker.process.process.pid for worker in scorer._workers]
    assert all(psutil.pid_exists(pid) for pid in ids)
    scorer.close()
    scorer.close()
    assert not any(psutil.pid_exists(pid) for pid in ids)  # not even as zombies


def test_workers_end_with_a_parent_that_is_killed_and_import_neither_torch_nor_numpy(tmp_path: Path):
    script = tmp_path / "parent.py"  # without a __main__ guard, and with torch: neither may matter
    script.write_text(
        "import time, torch\n"
        "from whetstone.config import build\n"
        "from whetstone.tasks.scoring.pool import Scorer\n"
        "scorer = Scorer(build({'datasets': {'countdown': {}}, 'reward_workers': 1}))\n"
        "while not scorer._workers[0].ready:\n"
        "    scorer._poll(0.1)\n"
        "print(scorer._workers[0].process.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    libraries = [Path(region.path).name for region in worker.memory_maps()]
    assert not any(name in library for library in libraries for name in ("torch", "_multiarray_umath"))
    parent.kill()
    parent.wait()
    worker.wait(timeout=10)
    parent.stdout.close()


def test_128_short_answers_cost_milliseconds(plain: Scorer):
    answers = [answer(countdown(30 + n // 8), "<think>a</think><answer>30 + 5</answer>") for n in range(128)]
    quickest = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for one in answers:
            plain.submit(one)
        assert len(plain.gather()) == 128
        quickest = min(quickest, time.perf_counter() - began)
    assert quickest < 0.25  # 15 to 20 ms on a quiet core; room for a busy machine


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_an_answer_that_asks_for_all_memory_gets_none_of_it(tmp_path: Path):
    config = math_config(tmp_path, reward_timeout_s=2.0, reward_funcs=["accuracy"])
    problem = build_tasks(config, "train").problem(0)
    with Scorer(config) as scorer:
        scorer.submit(answer(problem, r"\boxed{10^{10^{12}}}"))
        scorer.submit(answer(problem, r"\boxed{3}"))
        greedy, right = scorer.gather()
    assert greedy.parts["correct"] == 0.0 and greedy.reward == -1.0
    assert right.reward == 1.0


def scored(name: str, texts: list[str], **keys) -> tuple[Scorer, list]:
    with Scorer(configure(reward_funcs=[f"{OWN}:{name}"], reward_timeout_s=2.0, **keys)) as scorer:
        for text in texts:
            scorer.submit(answer(countdown(35), text))
        return scorer, scorer.gather()


def test_a_function_that_forks_does_not_answer_twice():
    _, scores = scored("forks", ["a", "b", "c"])
    assert [(score.reward, score.failure) for score in scores] == [(1.0, None)] * 3


def test_a_function_that_writes_into_the_pipe_costs_its_own_answer_only():
    _, scores = scored(
        "writes_to_every_descriptor", ["fine", "write", "fine"], max_reward_failure_fraction=0.9
    )
    assert [score.failure for score in scores] == [None, None, None]  # as one list it does not write
    _, scores = scored(
        "writes_to_every_descriptor", ["write", "fine", "fine"], max_reward_failure_fraction=0.9
    )
    assert [score.failure for score in scores] == ["crash", None, None]


def test_a_function_that_exits_is_a_failure_with_its_reason():
    _, scores = scored("exits", ["a", "b"], max_reward_failure_fraction=1.0)
    assert [score.failure for score in scores] == ["error: SystemExit: 0 (own_rewards.py, line 79)"] * 2


def test_values_that_are_no_rewards_cost_their_own_answer_only():
    texts = ["nan", "huge", "text", "list", "fine", "number"]
    scorer, scores = scored("some_unusable", texts, max_reward_failure_fraction=1.0)
    assert [score.reward for score in scores] == [0.0, 0.0, 0.0, 0.0, 0.5, 0.25]
    assert [score.failure is None for score in scores] == [False] * 4 + [True] * 2
    assert scorer.failures == 4


@pytest.mark.parametrize("name", ["one_value", "too_few", "no_numbers"])
def test_a_function_without_one_value_for_each_answer_ends_the_run(name: str):
    with pytest.raises(UserError, match=rf"\b{name}\b"):
        scored(name, ["a", "b"])


def test_a_function_that_has_no_number_for_any_answer_ends_the_run():
    with pytest.raises(UserError, match="no reward function returned a number"):
        scored("nothing", ["a", "b", "c"])


def test_failures_of_small_steps_are_judged_together():
    config = configure(reward_funcs=["accuracy", f"{OWN}:sometimes_bad"])
    with Scorer(config) as scorer:
        scorer.submit(answer(countdown(35), "raise"))
        assert scorer.gather()[0].failure is not None  # one failure never ends a run
        scorer.submit(answer(countdown(35), "raise"))
        scorer.gather()
        scorer.submit(answer(countdown(35), "raise"))
        with pytest.raises(UserError, match="3 of 3"):
            scorer.gather()


def test_a_lone_surrogate_that_a_function_logs_hurts_nobody():
    _, scores = scored("logs_surrogates", ["a"])
    assert scores[0].reward == 1.0 and list(scores[0].extra) == ["odd"]
    scores[0].extra["odd"].encode()


FAULTS = """
import os, threading, time

def stays(completions, **columns):
    if os.fork() == 0:
        time.sleep(3600)
    return [1.0] * len(completions)

def reads(completions, **columns):
    for descriptor in range(3, 64):
        try:
            os.set_blocking(descriptor, False)
            os.read(descriptor, 100)
        except OSError:
            pass
    return [1.0] * len(completions)

def raises_in_a_thread(completions, **columns):
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    return [1.0] * len(completions)

def logs_a_surrogate(completions, log_metric, **columns):
    log_metric("a\\ud800", 1.0)
    return [1.0] * len(completions)
"""


def members(groups: list[int]) -> list[int]:
    """Processes of these groups that still run."""
    running = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) in groups and process.info["status"] != psutil.STATUS_ZOMBIE:
                running.append(process.pid)
    return running


@pytest.mark.parametrize("name", ["stays", "reads", "raises_in_a_thread", "logs_a_surrogate"])
def test_what_a_function_leaves_behind_hurts_nobody(name: str, tmp_path: Path, capfd) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    config = configure(reward_funcs=[f"{tmp_path}/faults.py:{name}"], reward_workers=1)
    with Scorer(config) as scorer:
        for _ in range(2):  # what the first round leaves behind meets the second
            scorer.submit(answer(countdown(35), "<answer>30 + 5</answer>"))
            assert [score.reward for score in scorer.gather()] == [1.0]
        assert all(metric.encode() for metric in scorer.custom_metrics)
        groups = [worker.process.process.pid for worker in scorer._workers]
    deadline = time.monotonic() + 10
    while (left := members(groups)) and time.monotonic() < deadline:
        time.sleep(0.05)  # a killed process ends when the kernel comes to it
    assert left == []
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert ("ZeroDivisionError" in printed) == (name == "raises_in_a_thread")


@pytest.mark.parametrize("isolated", [False, True])
def test_a_worker_whose_parent_is_gone_ends_without_a_word(isolated: bool, capfd) -> None:
    worker = ScoringProcess(configure(), isolated=isolated)
    while not worker.messages():
        time.sleep(0.02)
    worker.process.connection.close()
    worker.process.process.wait(timeout=60)
    assert capfd.readouterr().err == ""
