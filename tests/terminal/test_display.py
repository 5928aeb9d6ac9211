"""Nobody waits in silence: the first line, the live line of a terminal, the plain lines of a pipe."""

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.waiting import wait_until
from whetstone.run.progress import Progress, bars, spacing
from whetstone.terminal.display import Display, display, say
from whetstone.terminal.stages import active, add_tokens, advance, reach, stage

ROOT = Path(__file__).resolve().parents[2]

# Prints, to stderr, the processor time and the modules at the moment of the first line.
SPY = """
import os, sys, time

class Spy:
    encoding = "utf-8"
    def write(self, text):
        if self is sys.spied:
            sys.spied = None
            names = [n for n in ("torch", "transformers", "pydantic", "rich", "yaml") if n in sys.modules]
            print(f"{time.process_time():.3f} {','.join(names) or 'none'} {text.strip()}", file=sys.stderr)
            os._exit(0)
    def flush(self): ...
    def isatty(self): return False

sys.stdout = sys.spied = Spy()
from whetstone.__main__ import run
run(sys.argv[1:])
"""


def terminal() -> tuple[io.StringIO, Console]:
    out = io.StringIO()
    return out, Console(file=out, width=80, force_terminal=True, color_system=None)


@pytest.mark.parametrize("verb", ["train", "eval", "profile", "compare", "serve"])
def test_the_first_line_comes_before_anything_heavy_is_imported(verb: str) -> None:
    command = [sys.executable, "-c", SPY, verb, "no_such_recipe"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    seconds, heavy, line = done.stderr.splitlines()[0].split(" ", 2)
    assert float(seconds) < 0.3  # of the processor: a busy machine does not change it much
    assert heavy == "none"
    assert re.fullmatch(rf"whetstone \d+\.\d+\.\d+: {verb} no_such_recipe", line)


def test_of_several_ranks_the_first_prints() -> None:
    command = [sys.executable, "-m", "whetstone", "train", "no_such_recipe"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "RANK": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_stages_nest_and_each_thread_has_its_own() -> None:
    begun, over = threading.Event(), threading.Event()

    def background() -> None:
        with stage("sampling", total=128):
            advance(37)
            add_tokens(5120)
            begun.set()
            over.wait()

    thread = threading.Thread(target=background)
    with stage("evaluation at step 10"), stage("scoring", total=4):
        thread.start()
        begun.wait()
        reach(3)
        assert [[str(entry) for entry in entries] for entries in active()] == [
            ["evaluation at step 10", "scoring 3/4"],
            ["sampling 37/128, 5,120 tokens"],
        ]
        line = Display(Console(quiet=True)).line(time.monotonic())
        assert line == "evaluation at step 10: scoring 3/4  sampling 37/128, 5,120 tokens  0:00"
        over.set()
        thread.join()
    assert active() == []
    advance()  # nobody's: no harm


def test_the_live_line_moves_while_the_main_thread_does_not() -> None:
    out, console = terminal()
    with Display(console), stage("update", total=4):  # as in one long forward pass
        wait_until(lambda: len(set(re.findall(r"update 0/4  0:\d\d", out.getvalue()))) >= 2)
    shown = out.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is there, even after SIGKILL


def test_the_live_line_keeps_to_the_width_of_the_terminal() -> None:
    out, console = terminal()
    with (
        Progress(30, console=console) as progress,
        stage("evaluation at step 3"),
        stage("sampling", total=300),
    ):
        for step in range(1, 21):
            progress.update(step, {"accuracy": step / 20, "step_time": 60.0})
        wait_until(lambda: "20/30 steps  evaluation at step 3: sampling 0/300" in out.getvalue())
    live = [part for part in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", out.getvalue()) if "sampling" in part]
    assert live and max(map(len, live)) <= 80
    assert "left" in live[-1] and "accuracy ▁" not in live[-1]  # what does not fit is left out
    assert re.search(r"step 1/30  accuracy 0\.05\n", out.getvalue())  # no time left: the live line has it


def test_history_of_a_long_run_in_a_terminal_is_thinned() -> None:
    assert [spacing(n) for n in (30, 60, 61, 200, 300, 500, 10_000)] == [1, 1, 2, 5, 5, 10, 200]
    out, console = terminal()
    progress = Progress(300, console=console)
    for step in range(1, 301):
        progress.update(step, {})
    assert [line.split()[1] for line in out.getvalue().splitlines()] == [
        "1/300", *(f"{step}/300" for step in range(5, 301, 5))
    ]  # fmt: skip


def test_bars() -> None:
    assert bars([0, 0.124, 0.5, 0.99, 1.0, 1.5, -1]) == "▁▁▅███▁"


def test_pipe_gets_lines_of_long_stages_only() -> None:
    out = io.StringIO()
    with Display(Console(file=out), first_line_s=1.5):
        for _ in range(20):
            with stage("scoring"):
                time.sleep(0.1)
        with stage("sampling", total=128):
            advance(37)
            wait_until(lambda: out.getvalue().count("\n") >= 1)
    assert [line[:19] for line in out.getvalue().splitlines()] == ["  sampling 37/128  "]


def test_the_pause_between_plain_lines_grows() -> None:
    out = io.StringIO()
    with Display(Console(file=out), first_line_s=0.1), stage("sampling"):
        begun = time.monotonic()
        wait_until(lambda: out.getvalue().count("sampling") == 4)
    assert time.monotonic() - begun > 1  # at about 0.1, 0.3, 0.7, 1.5 s


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TERM", "dumb")])
def test_what_cannot_erase_a_line_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True), first_line_s=0.1), stage("sampling"):
        wait_until(lambda: "sampling" in out.getvalue())
    assert "\x1b[2K" not in out.getvalue()


def test_one_display_at_a_time_and_none_for_a_silent_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as outer, display() as inner:
        assert inner is outer
    with display(is_main=False) as silent, stage("update"):
        assert silent is not outer
    assert capsys.readouterr().out == ""


def test_messages_are_wrapped_in_a_terminal_and_whole_in_a_pipe() -> None:
    text = "30 optimizer steps, 1 a batch (1 part x 1 iteration), micro-batches of as many tokens as fit"
    out, console = terminal()
    say(text, console=console)
    assert out.getvalue() == text.replace(" tokens as fit", "\n  tokens as fit\n")
    pipe = io.StringIO()
    say(text, console=Console(file=pipe, width=80))
    assert pipe.getvalue() == text + "\n"
