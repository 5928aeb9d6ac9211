"""What a model wrote never runs as code, and the process that scores it can reach nothing."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whetstone.config import Config, build
from whetstone.errors import UserError
from whetstone.sandbox import code_guard, evaluator
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.registry import evaluating_tasks
from whetstone.tasks.scoring import process
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

EVALUATED = ["simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24"]
EVALUATED += ["n_queens", "binary_matrix", "string_insertion", "spiral_matrix", "reasoning_gym/countdown"]


def payloads(canary: str, port: int) -> list[str]:
    """Texts that would leave a trace if any of them ran."""
    touch = f"touch {canary}"
    return [
        f'__import__("os").system("{touch}")',
        f'[__import__("os").system("{touch}")]',
        f'open("{canary}", "w")',
        f'(lambda: __import__("subprocess").run(["touch", "{canary}"]))()',
        f'[x for x in ().__class__.__base__.__subclasses__() if "Popen" in str(x)][0]("{touch}", shell=True)',
        f'exec("import os; os.system({touch!r})")',
        f'sympify(\'__import__("os").system("{touch}")\')',
        f"S(\"__import__('os').system('{touch}')\")",
        f"lambdify([], \"__import__('os').system('{touch}')\")()",
        f'__import__("socket").create_connection(("127.0.0.1", {port}))',
        f'__import__("pathlib").Path("{canary}").touch()',
        f"getattr(__builtins__, 'ev' + 'al')('__import__(\"os\").system(\"{touch}\")')",
        "type('X', (int,), {'__eq__': lambda a, b: True, '__sub__': lambda a, b: a})()",
        "[[type('Y', (str,), {'__eq__': lambda a, b: True})('Q')]]",
        "__import__('reasoning_gym').games.n_queens.NQueensDataset.score_answer.__code__",
        "[setattr(__import__('math'), 'isclose', lambda *a, **k: True)]",
    ]


def answer(problem, text: str) -> ScoringRequest:
    return ScoringRequest(problem=problem, text=text, completion_ids=(1,), truncated=False)


def configure(*tasks: str, **keys) -> Config:
    names = {name: {} for name in tasks}
    return build(
        {"datasets": names, "reward_workers": 1, "eval_num_samples": 0, "reward_funcs": ["accuracy"], **keys}
    )


@pytest.fixture
def listener():
    """(port, connections that came)"""
    server, came = socket.create_server(("127.0.0.1", 0)), []

    def accept() -> None:
        try:
            while True:
                came.append(server.accept()[1])
        except OSError:
            return

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1], came
    server.close()


def test_answers_are_not_evaluated_and_later_verdicts_stay(tmp_path: Path, listener):
    port, came = listener
    canary = tmp_path / "canary"
    tasks = build_tasks(configure(*EVALUATED), "train").tasks
    asked: list[tuple[ScoringRequest, float]] = []
    for task in tasks.values():
        problem = task.problem(0)
        gold = task.gold(problem)
        assert gold is not None
        for text in payloads(str(canary), port):
            asked += [(answer(problem, f"<answer>{text}</answer>"), 0.0), (answer(problem, gold), 1.0)]
        asked.append((answer(problem, "<answer>1</answer>"), 0.0))
    with Scorer(configure(*EVALUATED)) as scorer:
        for one, _ in asked:
            scorer.submit(one)
        scores = scorer.gather()
    assert [score.parts["correct"] for score in scores] == [expected for _, expected in asked]
    assert scorer.failures == 0
    assert not canary.exists() and came == []


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("1 + 2*3", True),
        ("[[1, 2], [3, 4]]", True),
        ("Integer(3)*Symbol('x')**Integer(2) + sin(Symbol('x'))", True),
        ("x**2 + C", True),
        ("__import__('os')", False),
        ("(lambda: 1)()", False),
        ("().__class__", False),
        ("open('f')", False),
        ("sympify('1')", False),
        ("[exit for y in [1]]", False),
        ("sin.__globals__", False),
        ("Symbol('x').func", False),
    ],
)
def test_only_arithmetic_and_known_functions_are_harmless(text: str, harmless: bool):
    assert code_guard.is_harmless(compile(text, "<string>", "eval")) == harmless


# What a scorer would try if all of the code guard failed: the operating system refuses it as well.
ATTEMPTS = """
import json, os, socket, sys
from whetstone.sandbox.isolate import isolate
from whetstone.sandbox.pool import free_user_number

channel, kind, secret, target, port, unix = int(sys.argv[1]), *sys.argv[2:7]
layers = isolate(kind, ["sympy"], memory_mb=2048, user_number=free_user_number())
found = {"layers": layers, "environment": os.environ.get("WHET_TEST_SECRET")}

def attempt(name, function):
    try:
        function()
        found[name] = "done"
    except BaseException as error:
        found[name] = type(error).__name__

attempt("import sympy", lambda: __import__("sympy.physics.units"))
attempt("read secret", lambda: open(secret).read())
attempt("read passwords", lambda: open("/etc/shadow").read())
attempt("read our own package", lambda: open(sys.modules["whetstone"].__file__).read())
attempt("parent's environment", lambda: open(f"/proc/{os.getppid()}/environ").read() + str(1 / os.getppid()))
attempt("write", lambda: open(target, "w").write("x"))
attempt("write to tmp", lambda: open("/tmp/whet-isolation-test", "w").write("x"))
attempt("network", lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=2))
attempt("unix socket", lambda: socket.socket(socket.AF_UNIX).connect(unix))
attempt("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", unix))
attempt("signal others", lambda: os.kill(os.getppid() or 2, 0))
attempt("execute", lambda: os.posix_spawn("/bin/touch", ["touch", target], {}))
attempt("change root", lambda: os.chroot("/"))
os.write(channel, json.dumps(found).encode())
"""


@pytest.mark.parametrize("kind", ["namespaces", "filters"])
def test_an_isolated_process_reaches_nothing(kind: str, tmp_path: Path, listener):
    port, came = listener
    secret, target, unix = tmp_path / "secret", tmp_path / "target", tmp_path / "socket"
    secret.write_text("secret")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(str(unix))
    server.setblocking(False)
    ours, theirs = os.pipe()
    script = tmp_path / "attempts.py"
    script.write_text(ATTEMPTS)
    arguments = [str(theirs), kind, str(secret), str(target), str(port), str(unix)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}  # as the pool gives it
    done = subprocess.run(
        [sys.executable, str(script), *arguments], pass_fds=[theirs], env=environment, timeout=60, check=False
    )
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        found = json.loads(pipe.read() or "{}")
    assert done.returncode == 0 and "seccomp" in found.pop("layers")
    assert found.pop("environment") is None
    assert found.pop("import sympy") == "done"
    if kind == "filters":  # no namespace hides it there; it holds no answer of anybody
        found.pop("read our own package")
    # Spawning is allowed by neither kind to do harm: the child is as isolated as we are.
    found.pop("execute")
    assert {name for name, result in found.items() if result == "done"} == set()
    assert not target.exists() and came == [] and not Path("/tmp/whet-isolation-test").exists()
    with pytest.raises(BlockingIOError):
        server.recv(10)
    server.close()


def test_a_scoring_process_has_none_of_our_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHET_TEST_SECRET", "hunter2")
    with Scorer(configure("chain_sum")) as scorer:
        (worker,) = scorer._workers
        assert worker.isolated
        environment = Path(f"/proc/{worker.process.process.pid}/environ").read_bytes()
    assert b"hunter2" not in environment and b"PYTHONHASHSEED=0" in environment


def test_without_isolation_evaluating_tasks_are_refused(monkeypatch: pytest.MonkeyPatch):
    def none_here(isolation: str) -> str:
        raise UserError("no namespaces and no seccomp.")

    monkeypatch.setattr(process, "strongest_kind", none_here)
    assert process.isolation_kind(configure("chain_sum", "countdown")) == "limits"
    config = configure("chain_sum", "simple_integration", "n_queens")
    assert evaluating_tasks(config) == ["simple_integration", "n_queens"]
    with pytest.raises(UserError, match=r"simple_integration, n_queens.*sandbox_isolation=limits"):
        process.isolation_kind(config)


def test_limits_is_the_users_own_decision():
    config = configure("simple_integration", sandbox_isolation="limits")
    assert process.isolation_kind(config) == "limits"
    problem = build_tasks(config, "train").problem(0)
    with Scorer(config) as scorer:  # the code guard is still there
        scorer.submit(answer(problem, "<answer>__import__('os').getpid()</answer>"))
        assert scorer.gather()[0].parts["correct"] == 0.0


def _double(value: float) -> float:
    return 2 * value


def _hang(_: float) -> float:
    while True:
        pass


def _die(_: float) -> float:
    os._exit(3)


def _leave_a_trace(_: float) -> float:
    _seen.append(1)
    return float(len(_seen))


_seen: list[int] = []


def test_calls_are_made_in_a_fork_with_a_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluator, "_limit_s", 1.0)
    try:
        assert [evaluator.evaluate(_double, value) for value in (1.0, 2.5)] == [2.0, 5.0]
        for function, reason in ((_hang, "timeout"), (_die, "crash")):
            with pytest.raises(evaluator.EvaluationFailed, match=reason):
                evaluator.evaluate(function, 0.0)
            assert evaluator.evaluate(_double, 3.0) == 6.0
        assert evaluator.evaluate(_leave_a_trace, 0.0) == 1.0 and _seen == []
        evaluator.renew()
        assert evaluator.evaluate(_leave_a_trace, 0.0) == 1.0
    finally:
        evaluator.renew()


def test_a_scorer_that_raises_in_its_fork_means_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    config = configure("simple_integration")
    (task,) = build_tasks(config, "train").tasks.values()
    problem = task.problem(0)
    broken = dataclasses.replace(problem, answer={**problem.answer, "metadata": {}})
    monkeypatch.setattr(evaluator, "_limit_s", 20.0)
    try:
        assert task.score(broken, "<answer>x**2 + C</answer>").parts["correct"] == 0.0
    finally:
        evaluator.renew()


def test_without_a_limit_a_call_is_a_plain_one():
    assert evaluator.evaluate(_double, 4.0) == 8.0
