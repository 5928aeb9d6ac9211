"""The corpus of bad reward functions, as far as importing goes; whole runs are the campaign's part."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.corpora import rewards
from whetstone.errors import UserError, message_of
from whetstone.rewards.verify import verify


def cases(folder: Path) -> dict[str, rewards.Case]:
    return {case.name: case for case in rewards.write(folder)}


@pytest.mark.parametrize("slow", [False, True])
def test_what_cannot_be_imported_is_refused_in_one_sentence(tmp_path: Path, slow: bool):
    refused = [c for c in cases(tmp_path).values() if c.outcome == rewards.REFUSED and c.is_slow == slow]
    assert len(refused) >= 3

    def refuse(case: rewards.Case) -> None:
        began = time.monotonic()
        with pytest.raises(UserError) as caught:
            verify([case.spec], timeout_s=2 if slow else 60)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000, case.name
        if slow:
            assert time.monotonic() - began >= 2 and "longer than 2 s" in str(caught.value)

    with ThreadPoolExecutor(4 if slow else 2) as threads:  # the slow ones sleep
        list(threads.map(refuse, refused))


def test_an_error_whose_message_fails_has_its_type(tmp_path: Path):
    class Strange(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert message_of(Strange()).startswith("Strange")
    assert message_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    path = tmp_path / "strange.py"
    path.write_text(
        "def f(completions):\n    return []\n"
        "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()\n"
    )
    with pytest.raises(UserError, match="E: "):
        verify([f"{path}:f"], timeout_s=60)


def test_a_function_that_takes_no_completions_is_refused():
    with pytest.raises(UserError, match="os:system"):
        verify(["os:system"], timeout_s=60)


def test_nothing_is_left_behind(tmp_path: Path):
    """An import that starts a process: it is ended too."""
    path = tmp_path / "forks.py"
    path.write_text(
        "import os, time\nchild = os.fork()\nif child == 0:\n    time.sleep(600)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child))\n"
        "def f(completions):\n    return []\n"
    )
    verify([f"{path}:f"], timeout_s=60)
    child = int((tmp_path / "pid").read_text())
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split(")")[-1].split()[0] == "Z":
            return  # ended; whoever adopted it has not asked yet
        time.sleep(0.05)
    pytest.fail("the process that the import started still runs")
