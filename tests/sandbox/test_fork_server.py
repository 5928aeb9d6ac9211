"""Workers that are forked from a server: what they inherit, what they must not, and how both end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from whetstone.sandbox import fork_server
from whetstone.sandbox.fork_server import ForkedWorker
from whetstone.sandbox.zygote import link_pair

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolated workers are forked on Linux only")
TARGET = "tests.support.forked:tell"


@pytest.fixture
def worker() -> Iterator[ForkedWorker]:
    worker = ForkedWorker(TARGET)
    yield worker
    worker.close()


def look(worker: ForkedWorker) -> dict[str, Any]:
    worker.connection.send("look")
    assert worker.connection.poll(30)
    return worker.connection.recv()


def test_a_fork_has_its_pipe_and_nothing_of_ours(worker, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    with_ours = look(worker)
    assert "SECRET_OF_THE_USER" not in with_ours["variables"] and "HOME" not in with_ours["variables"]
    assert with_ours["leads_its_group"]
    # Its own pipe: a socket to the server would let a worker start processes outside its isolation.
    assert [name.partition(":")[0] for name in with_ours["files"]] == ["socket"]
    server = psutil.Process(with_ours["server"])
    assert "SECRET_OF_THE_USER" not in server.environ() and "HOME" not in server.environ()
    assert "torch" not in with_ours["modules"]


def test_forks_of_one_server_follow_us(worker, tmp_path, monkeypatch, capfd):
    before = look(worker)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "own")
    capfd.readouterr()
    later = ForkedWorker(TARGET, ["wave", "no_such_module_at_all"])
    try:
        after = look(later)
    finally:
        later.close()
    assert after["server"] == before["server"]
    assert after["folder"] == str(tmp_path) != before["folder"]
    assert after["path"][0] == str(tmp_path / "own") != before["path"][0]
    assert "wave" in after["modules"] and "wave" not in before["modules"]
    assert capfd.readouterr().err.count("looked") == 1  # on the stderr of now


def test_where_the_environment_is_kept_it_is_that_of_now(monkeypatch):
    seen = []
    for name in ("FIRST", "SECOND"):
        with monkeypatch.context() as patch:
            patch.setenv(f"{name}_VARIABLE", "x")
            worker = ForkedWorker(TARGET, keep_environment=True)
            seen.append(look(worker))
            worker.close()
    first, second = seen
    assert first["server"] == second["server"]
    assert "FIRST_VARIABLE" in first["variables"] and "SECOND_VARIABLE" not in first["variables"]
    assert "SECOND_VARIABLE" in second["variables"] and "FIRST_VARIABLE" not in second["variables"]
    assert "PATH" in first["variables"]


def test_ends_are_seen_and_leave_nothing(worker):
    look(worker)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(timeout=0.01)
    worker.connection.send("end")
    assert worker.process.wait(timeout=30) == 3 == worker.process.returncode
    killed = ForkedWorker(TARGET)
    pid = killed.process.pid
    killed.close()
    killed.close()
    assert killed.process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(pid)  # not even as a zombie


def test_a_server_without_workers_ends():
    code = "from whetstone.sandbox import fork_server as f, zygote as z; import sys; f.IDLE_S = 0.3; "
    code += "f.serve(sys.argv[1], z.Link.from_descriptor(int(sys.argv[2])))"
    ours, theirs = link_pair()
    command = [sys.executable, "-c", code, TARGET, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    assert process.wait(timeout=60) == 0
    ours.close()
    theirs.close()


def test_a_server_that_was_killed_is_replaced(worker):
    server = look(worker)["server"]
    os.kill(server, signal.SIGKILL)
    worker.close()
    assert worker.process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while True:  # one that is asked in the same moment may get no answer, as from a worker that died
        another = ForkedWorker(TARGET)
        try:
            assert look(another)["server"] != server
            break
        except (EOFError, OSError):
            assert time.monotonic() < deadline
        finally:
            another.close()


def test_a_server_that_was_stopped_is_given_up(worker, monkeypatch):
    monkeypatch.setattr(fork_server, "REPLY_LIMIT_S", 0.2)
    server = look(worker)["server"]
    os.kill(server, signal.SIGSTOP)
    unborn = ForkedWorker(TARGET)
    started = time.monotonic()
    unborn.close()  # it waits for a number that nobody tells
    worker.close()
    assert time.monotonic() - started < 10
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
    another = ForkedWorker(TARGET)
    monkeypatch.setattr(fork_server, "REPLY_LIMIT_S", 60.0)
    assert look(another)["server"] != server
    another.close()


def test_a_server_ends_with_its_user_and_does_not_wait_for_forks(tmp_path):
    script = (
        "import os, sys, time\n"
        "from whetstone.sandbox.fork_server import ForkedWorker\n"
        f"worker = ForkedWorker({TARGET!r})\n"
        "worker.connection.send('look')\n"
        "server = worker.connection.recv()['server']\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    again = ForkedWorker(sys.argv[1])\n"
        "    again.connection.send('look')\n"
        "    assert again.connection.recv()['server'] != server\n"
        "    again.close()\n"
        "    print('own server', flush=True)\n"
        "    time.sleep(60)\n"
        "print(server, worker.process.pid, child, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    user = subprocess.Popen(
        [sys.executable, "-c", script, TARGET], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert user.stdout is not None
    lines = sorted(user.stdout.readline().strip() for _ in range(2))
    assert lines[1] == "own server"
    server, worker, child = map(psutil.Process, map(int, lines[0].split()))
    user.kill()
    user.wait()
    try:
        psutil.wait_procs([server, worker], timeout=20)
        assert not server.is_running() and not worker.is_running() and child.is_running()
    finally:
        child.kill()
        user.stdout.close()
