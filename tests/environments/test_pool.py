"""Episodes in processes: what they cost, and what environments that misbehave cost others."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import bad, bad_tools, itself
from tests.support.waiting import wait_until
from whetstone.environments.games import GuessNumber
from whetstone.environments.pool import Answer, EpisodePool
from whetstone.errors import UserError

FILE, TOOLS_FILE = Path(bad.__file__), Path(bad_tools.__file__)


def play(pool: EpisodePool, number: int, text: str = "yes", max_steps: int = 2) -> Answer:
    """The episode's last answer, beside one that must not be disturbed."""
    for _ in range(max_steps + 1):
        [answer] = wait_until(lambda: [answer for answer in pool.poll(1.0) if answer.number == number])
        if answer.done:
            return answer
        pool.step(number, text)
    raise AssertionError("it never ended")


@pytest.fixture(scope="module")
def bad_pool():
    specs = [f"{FILE}:{kind.__name__}" for kind in (bad.Good, *bad.REASONS)]
    specs += [f"{TOOLS_FILE}:{kind.__name__}" for kind in bad_tools.RESULTS]
    with EpisodePool(specs, timeout_s=2.0, memory_mb=512) as pool:
        yield pool


@pytest.mark.parametrize("kind", bad.REASONS, ids=lambda kind: kind.__name__)
def test_bad_environment_costs_only_its_own_episode(bad_pool, kind):
    reason = bad.REASONS[kind]
    bad_pool.start(1, f"{FILE}:{kind.__name__}", {}, 7, {})
    answer = play(bad_pool, 1)
    bad_pool.end(1)
    if reason is None:
        assert answer.error is None and answer.reward == 1.0
    else:
        assert answer.error is not None and reason in answer.error, answer
        assert answer.is_timeout == (reason == "no answer in")
    bad_pool.start(2, f"{FILE}:Good", {}, 9, {})
    [first] = [] or bad_pool.poll(10.0)
    assert first.observation == ({"role": "user", "content": "say 9"},)
    bad_pool.step(2, "yes")
    assert play(bad_pool, 2).correct is True
    bad_pool.end(2)


def one_answer(pool: EpisodePool) -> Answer:
    return wait_until(lambda: pool.poll(1.0))[0]


@pytest.mark.parametrize("kind", bad_tools.RESULTS, ids=lambda kind: kind.__name__)
def test_a_tool_that_misbehaves_costs_only_its_own_episode(bad_pool, kind):
    result, reason = bad_tools.RESULTS[kind]
    bad_pool.start(1, f"{TOOLS_FILE}:{kind.__name__}", {}, 7, {})
    assert one_answer(bad_pool).observation[0]["content"] == "call it"
    bad_pool.step(1, "", [{"name": "use", "arguments": {}}])
    answer = one_answer(bad_pool)
    if result is not None:
        assert result in answer.observation[0]["content"]
        assert answer.num_tool_errors == result.startswith("Error")
        bad_pool.finish(1)
        answer = one_answer(bad_pool)
        assert answer.reward == (1.0 if reason is None else None)
    assert (answer.error is None) if reason is None else (reason in (answer.error or "")), answer
    bad_pool.end(1)


def test_what_left_its_group_is_ended_too(bad_pool):
    bad_pool.start(1, f"{FILE}:LeavesADaemon", {}, 7, {})
    play(bad_pool, 1)
    folder = Path(tempfile.gettempdir())
    wait_until(lambda: any(path.read_text() for path in folder.glob("whet-episodes-*/*/daemon")))
    (file,) = folder.glob("whet-episodes-*/*/daemon")
    daemon = Path("/proc") / file.read_text()
    assert daemon.exists()
    bad_pool.end(1)
    wait_until(lambda: not daemon.exists())
    assert not file.exists()


def test_the_gold_player_wins_every_game_of_many_at_once():
    with EpisodePool(["guess_number"], timeout_s=30.0, memory_mb=512) as pool:
        players = {number: GuessNumber.gold_player() for number in range(64)}
        for number in players:
            pool.start(number, "guess_number", {}, number, {})
        won = 0
        while players:
            for answer in pool.poll(10.0):
                if answer.done:
                    won += answer.correct is True
                    pool.end(answer.number)
                    del players[answer.number]
                else:
                    pool.step(answer.number, players[answer.number](answer.observation[0]["content"]))
        assert won == 64


def children(pool: EpisodePool) -> set[int]:
    """Processes that the host has forked."""
    parents = {stat.parent.name: _read(stat).rpartition(")")[2].split() for stat in _stats()}
    host = pool._host.process.pid
    return {int(name) for name, fields in parents.items() if fields and int(fields[1]) == host}


def run_together(pool: EpisodePool, count: int) -> dict[int, tuple[int, int, str]]:
    """(process, sockets, folder for files) of each of `count` episodes at once, which are ended then."""
    spec, answers = f"{Path(itself.__file__)}:Itself", {}
    for number in range(count):
        pool.start(number, spec, {}, number, {})
    while len(answers) < count:
        for answer in pool.poll(10.0):
            assert answer.error is None
            process, sockets, folder = answer.observation[0]["content"].split()
            answers[answer.number] = (int(process), int(sockets), folder)
    for number in range(count):
        pool.end(number)
    return answers


def wait_for_children(pool: EpisodePool, are_there: Callable[[set[int]], bool]) -> set[int]:
    wait_until(lambda: are_there(children(pool)))
    return children(pool)


def test_episodes_run_in_processes_that_were_forked_before():
    with EpisodePool([f"{Path(itself.__file__)}:Itself"], timeout_s=30.0, memory_mb=512) as pool:
        assert not children(pool)  # how many will be needed is not known yet
        first = {process for process, _, _ in run_together(pool, 6).values()}
        spares = wait_for_children(pool, lambda own: len(own) == 6 and not own & first)
        answers = run_together(pool, 6)
        assert {process for process, _, _ in answers.values()} == spares
        assert {sockets for _, sockets, _ in answers.values()} == {1}  # its own alone
        assert all(folder.endswith(f"/{process}") for process, _, folder in answers.values())
        # Spares that somebody has killed are replaced.
        spares = wait_for_children(pool, lambda own: len(own) == 6 and not own & spares)
        for process in sorted(spares)[:4]:
            os.kill(process, signal.SIGKILL)
        for process in sorted(spares)[:4]:  # the signal takes a moment: one that dies may still be chosen
            while _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"]):
                time.sleep(0.001)
        again = {process for process, _, _ in run_together(pool, 8).values()}
        assert len(again) == 8 and not again & set(sorted(spares)[:4])
        wait_for_children(pool, lambda own: len(own) == 8 and not own & again)


def test_nothing_is_left_behind():
    with EpisodePool(["guess_number"], timeout_s=30.0, memory_mb=512) as pool:
        for number in range(5):
            pool.start(number, "guess_number", {}, number, {})
        assert len(pool.poll(10.0)) >= 1
        group = pool._host.process.pid
    assert not [
        stat
        for stat in _stats()
        if (fields := _read(stat).rpartition(")")[2].split()) and group in (int(fields[1]), int(fields[2]))
    ]


def _stats() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*/stat"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # ended meanwhile
        return ""


def test_an_environment_that_cannot_be_imported_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\nclass Env: ...\n")
    with pytest.raises(UserError, match="nothing_of_that_name"):
        EpisodePool([f"{tmp_path / 'broken.py'}:Env"], timeout_s=1.0, memory_mb=64)
