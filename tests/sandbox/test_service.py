"""A sandbox that many processes share: who waits, what a program sees of another's, and how it ends."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from whetstone.errors import UserError
from whetstone.sandbox import languages, service
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import LOST, Input, Limits, Program
from whetstone.sandbox.service import SandboxService, ServicePool
from whetstone.sandbox.worker_process import available_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox runs on Linux only")
LIMITS = Limits(seconds=5.0, total_seconds=10.0)
SQUARE = Program(language="python", source="print(int(input()) ** 2)", inputs=(Input(stdin="12"),))


@pytest.fixture
def shared() -> Iterator[SandboxService]:
    made = SandboxService("auto")
    yield made
    made.close()


def program(source: str) -> Program:
    return Program(language="python", source=source)


def children(made: SandboxService) -> list[psutil.Process]:
    return psutil.Process(made._worker.process.pid).children()


def test_it_answers_as_a_pool_of_ones_own(shared):
    programs = [SQUARE, program("print("), program("1 / 0"), program("import time; time.sleep(60)")]
    limits = Limits(seconds=2)
    pool = ServicePool(shared.address)
    with LocalPool() as own:
        for entry in programs:
            [theirs], [ours] = pool.run(entry, limits).results, own.run(entry, limits).results
            for name in ("outcome", "stdout", "exit_code"):
                assert getattr(theirs, name) == getattr(ours, name)
            assert theirs.stderr.splitlines()[-1:] == ours.stderr.splitlines()[-1:]
        pool.start("python")
        assert pool.statement == own.statement


def test_calls_one_after_the_other_have_one_supervisor(shared):
    for _ in range(5):
        pool = ServicePool(shared.address)
        assert pool.run(SQUARE, LIMITS).results[0].stdout == "144\n"
        pool.close()
        pool.close()
    assert len(children(shared)) == 1


def test_calls_at_once_have_a_few_for_each_core(shared):
    most = max(4, 2 * available_cores())

    def run(number: int) -> str:
        pool = ServicePool(shared.address)
        source = f"import time; time.sleep(0.05); print({number})"
        stdout = pool.run(program(source), LIMITS).results[0].stdout
        pool.close()
        return stdout

    with ThreadPoolExecutor(40) as threads:
        assert list(threads.map(run, range(40))) == [f"{number}\n" for number in range(40)]
    assert 1 < len(children(shared)) <= most


def test_waiting_call_starts_a_temporary_supervisor():
    supervisors = service._Supervisors("auto", most=1)
    service_pause, service.PATIENCE_S = service.PATIENCE_S, 0.1
    try:
        with supervisors.borrow() as first, supervisors.borrow() as second:
            assert first is not second
            assert second.run(SQUARE, LIMITS).results[0].stdout == "144\n"
            [process] = (entry.process for entry in second._supervisors.values())
        assert process.poll() is not None and supervisors._free == [first]
        supervisors.close()
        with pytest.raises(EOFError), supervisors.borrow():
            pass
    finally:
        service.PATIENCE_S = service_pause


def test_nothing_of_a_program_is_left_for_the_next_one(shared):
    pool, other = ServicePool(shared.address), ServicePool(shared.address)
    left = "import os, sys; sys.modules['mark'] = 1; os.environ['MARK'] = '1'; open('mark', 'w').write('1')"
    assert pool.run(program(left), LIMITS).results[0].ok
    look = "import os, sys; print('mark' in sys.modules, 'MARK' in os.environ, os.listdir())"
    found = other.run(program(look), LIMITS).results[0].stdout
    assert found.startswith("False False") and "mark'" not in found
    assert len(children(shared)) == 1  # the same supervisor


def test_it_has_none_of_our_environment_variables(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    made = SandboxService("auto")
    try:
        assert ServicePool(made.address).run(SQUARE, LIMITS).results[0].ok
        for process in (psutil.Process(made._worker.process.pid), *children(made)):
            assert "SECRET_OF_THE_USER" not in process.environ()
    finally:
        made.close()


def test_a_supervisor_that_is_killed_is_replaced(shared):
    pool = ServicePool(shared.address)
    pool.run(SQUARE, LIMITS)
    [child] = children(shared)
    child.send_signal(signal.SIGKILL)
    assert pool.run(SQUARE, LIMITS).results[0].stdout == "144\n"


def test_a_service_that_is_gone_loses_the_call(shared):
    pool = ServicePool(shared.address)
    pool.run(SQUARE, LIMITS)
    supervisor = children(shared)[0]
    os.kill(shared._worker.process.pid, signal.SIGKILL)
    assert pool.run(SQUARE, LIMITS).results == (LOST,)
    supervisor.wait(10)  # it ends with its service


def test_closing_leaves_nothing(shared):
    pool = ServicePool(shared.address)
    call = (program("import time; time.sleep(60)"), LIMITS)
    threading.Thread(target=pool.run, args=call, daemon=True).start()
    while not (processes := [psutil.Process(shared._worker.process.pid), *children(shared)])[1:]:
        time.sleep(0.01)
    shared.close()
    shared.close()
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not os.path.exists(os.path.dirname(shared.address))


def test_a_language_that_is_missing_is_named(shared):
    if not languages.missing("q"):
        pytest.skip("q is installed")
    with pytest.raises(UserError, match="q"):
        ServicePool(shared.address).start("q")


def test_a_long_path_for_temporary_files(tmp_path, monkeypatch):
    """The path of a socket may have 107 characters."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    made = SandboxService("auto")
    try:
        assert ServicePool(made.address).run(SQUARE, LIMITS).results[0].ok
    finally:
        made.close()


def test_a_process_uses_the_service_it_was_told(shared):
    assert isinstance(service.open_pool("auto"), LocalPool)
    service.use_service(shared.address)
    try:
        assert isinstance(service.open_pool("auto"), ServicePool)
    finally:
        service.use_service(None)
