"""Rows and where they go: metrics.jsonl, the sinks, training.log, the progress line."""

import io
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich
from rich.console import Console

from tests.support.waiting import wait_until
from whetstone.config import build
from whetstone.errors import UserError
from whetstone.files import atomic_write
from whetstone.run.metrics import LogSchedule, MetricsLog, read_rows, wandb_sink, with_own
from whetstone.run.progress import Progress
from whetstone.terminal.log import setup_logging
from whetstone.terminal.stages import stage
from whetstone.terminal.text import duration


@pytest.fixture(autouse=True)
def _no_handlers_left() -> Iterator[None]:
    yield
    logger = logging.getLogger("whetstone")
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
        handler.close()


def open_log(folder: Path, *, resume_step: int | None = None, **settings) -> MetricsLog:
    config = build({"wandb_project": "p", "run_name": "r", "seed": 1, **settings})
    return MetricsLog(folder, config, resume_step=resume_step)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_row_is_on_disk_when_log_returns(tmp_path: Path):
    log = open_log(tmp_path, logging_steps=10)  # metrics.jsonl has every step all the same
    log.log_eval(0, {"accuracy": 0.25})
    log.log(1, {"reward": 0.5, "kl": math.nan, "loss": math.inf})
    assert lines(tmp_path) == [
        {"step": 0, "kind": "eval", "accuracy": 0.25},
        {"step": 1, "kind": "train", "reward": 0.5, "kl": None, "loss": None},
    ]
    log.close()


def test_resume_drops_later_rows_and_half_a_line(tmp_path: Path):
    log = open_log(tmp_path)
    log.log_eval(0, {"accuracy": 0.1})
    for step in range(1, 6):
        log.log(step, {"reward": step / 10})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "kind": "tra')  # killed in mid-write
    log = open_log(tmp_path, resume_step=3)
    for step in (4, 5):
        log.log(step, {"reward": 9.0})
    log.close()
    assert [(row["kind"], row["step"]) for row in lines(tmp_path)] == [
        ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("train", 4), ("train", 5)
    ]  # fmt: skip
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")[1:]] == [0.1, 0.2, 0.3, 9.0, 9.0]


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path):
    open_log(tmp_path).log(1, {"reward": 1.0})
    open_log(tmp_path).close()
    assert lines(tmp_path) == []


def shown(every: int, start: int, steps: range) -> list[int]:
    cadence = LogSchedule(every, start_step=start)
    return [step for step in steps if cadence.is_due(step)]


def test_which_steps_are_shown():
    assert shown(5, 0, range(1, 12)) == [1, 5, 10]
    assert shown(5, 7, range(8, 12)) == [10]  # resumed: 8 is not a run's first step
    # two optimizer steps a row: 5 and 15 are passed
    assert shown(5, 0, range(2, 22, 2)) == [2, 6, 10, 16, 20]


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.setitem(
            sys.modules, name, None
        )  # what Python itself does for a package that is not there
        with pytest.raises(UserError, match=f"pip install {name}"):
            open_log(tmp_path, report_to=(name,))


class _Unplugged:
    """A sink whose network goes away after two rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, step: int, row: dict[str, float]) -> None:
        if len(self.rows) == 2:
            raise ConnectionError("network unreachable")
        self.rows.append(step)

    def close(self) -> None:
        raise AssertionError("it was dropped")


def test_a_sink_that_fails_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    log, sink = open_log(tmp_path), _Unplugged()
    log._sinks["wandb"] = sink  # type: ignore[assignment]
    for step in range(1, 6):
        log.log(step, {"reward": 0.0})
    log.close()
    assert sink.rows == [1, 2]
    assert len(lines(tmp_path)) == 5
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("wandb failed (ConnectionError: network unreachable)")


def test_tensorboard_holds_the_numbers_of_the_logging_steps(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore
        EventAccumulator,
    )

    log = open_log(tmp_path, report_to=("tensorboard",), logging_steps=2)
    log.log_eval(0, {"accuracy": 0.25})
    for step in range(1, 6):
        log.log(step, {"reward": step / 8, "kl": math.nan})
    log.close()
    log = open_log(tmp_path, report_to=("tensorboard",), logging_steps=2, resume_step=2)
    for step in range(3, 7):
        log.log(step, {"reward": 1.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [
        (1, 0.125),
        (2, 0.25),
        (4, 1.0),
        (6, 1.0),
    ]
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(0, 0.25)]
    assert "train/kl" not in events.Tags()["scalars"]


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = open_log(tmp_path, report_to=("wandb",))
    log.log(1, {"reward": 0.5})
    log.close()
    first = (tmp_path / ".wandb_id").read_text()
    log = open_log(tmp_path, report_to=("wandb",), resume_step=1)
    log.log(2, {"reward": 0.75})
    log.close()
    assert (tmp_path / ".wandb_id").read_text() == first
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{first}/*.wandb"))) >= 1


def test_wandb_gets_entity_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = wandb_sink(tmp_path, build({"wandb_entity": "us", "wandb_tags": ["a", "b"]}), None)
    run = wandb.run
    assert run is not None and (run.entity, tuple(run.tags or ())) == ("us", ("a", "b"))
    sink.close()


def test_trackio_holds_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    log = open_log(tmp_path, report_to=("trackio",))
    log.log(1, {"reward": 0.5})
    log.log(2, {"reward": 0.75})
    log.close()
    rows = SQLiteStorage.get_logs("p", "r")
    assert [(row["step"], row["train/reward"]) for row in rows] == [(1, 0.5), (2, 0.75)]


def test_write_aside_leaves_the_old_file_where_writing_fails(tmp_path: Path):
    path = tmp_path / "results.json"
    atomic_write(path, "old")
    with pytest.raises(TypeError):
        atomic_write(path, ["no text"])  # type: ignore[arg-type]
    assert path.read_text() == "old"
    atomic_write(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_clear_sentence(tmp_path: Path):
    log = open_log(tmp_path)
    log.close()
    log._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(UserError, match=r"disk is full.*metrics\.jsonl.*auto_resume"):
        log.log(1, {"reward": 1.0})


def test_training_log_has_time_stamps_and_the_terminal_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = io.StringIO()
    monkeypatch.setattr(rich, "_console", Console(file=out, width=80))
    logger = setup_logging(tmp_path)
    setup_logging(tmp_path)  # a second run in one process does not double every line
    logger.info("60 steps [of] 8 prompts")
    assert out.getvalue() == "60 steps [of] 8 prompts\n"
    (line,) = (tmp_path / "training.log").read_text().splitlines()
    stamp, message = line[:23], line[24:]
    assert stamp[4] == stamp[7] == "-" and stamp[13] == ":"
    assert message == "INFO    60 steps [of] 8 prompts"


ROW = {"reward": 0.526, "accuracy": 0.614, "tokens_per_s": 2345.4, "step_time": 2.0}


def test_plain_progress_lines_one_per_logging_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(rich, "_console", Console(file=out, width=40))
    setup_logging(tmp_path)
    with Progress(62, logging_steps=2, clock=lambda: now[0]) as progress:
        for step in range(1, 13):
            now[0] += 2.04
            progress.update(step, ROW)
    printed = out.getvalue().splitlines()
    assert (
        printed[0] == "step 1/62  reward 0.53  accuracy 0.61  2,345 tokens/s  2:02 left"
    )  # from its own time
    assert printed[-1] == "step 12/62  reward 0.53  accuracy 0.61  2,345 tokens/s  1:42 left"
    assert len(printed) == 7
    logged = (tmp_path / "training.log").read_text().splitlines()
    assert [line[32:] for line in logged] == printed


def test_time_left_follows_the_pace_of_recent_steps():
    now = [0.0]
    progress = Progress(100, console=Console(file=io.StringIO()), clock=lambda: now[0])
    for step in range(1, 51):
        now[0] += 10.0 if step <= 25 else 1.0
        progress.update(step, {})
    assert progress.seconds_left(50, {}) == 50.0
    assert progress.line(50, {}) == "step 50/100  0:50 left"
    assert progress.line(100, {}) == "step 100/100"


def test_what_is_done_once_is_no_part_of_the_time_left():
    progress = Progress(11, console=Console(file=io.StringIO()))
    assert progress.seconds_left(1, {"step_time": 18.0, "setup_time": 15.0}) == 30.0


def test_the_last_step_is_shown_whatever_logging_steps_says():
    out = io.StringIO()
    progress = Progress(3, logging_steps=2, console=Console(file=out))
    for step in (1, 2, 3):
        progress.update(step, {"reward": step})
    shown = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    assert shown == ["step 1/3", "step 2/3", "step 3/3"]


def test_a_terminal_gets_one_line_that_moves():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with Progress(2, console=console) as progress, stage("sampling", total=8):
        progress.update(1, ROW)
        console.print("a message")
        wait_until(lambda: "1/2 steps  sampling 0/8  0:00" in out.getvalue())  # a thread redraws it
        progress.update(2, ROW)
    text = out.getvalue()
    assert "\x1b[2K" in text  # the line was erased and drawn again
    assert text.index("step 1/2") < text.index("a message") < text.index("step 2/2")
    assert text.count("step 1/2") == text.count("step 2/2") == 1  # history stays
    assert "1/2 steps  sampling 0/8  0:00" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.2, "0:07"), (102, "1:42"), (59.6, "1:00"), (7384, "2:03:04")]
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_metrics_of_reward_functions_replace_none_of_ours(tmp_path):
    row = {"reward": 0.5, "loss": 0.1}
    own = {"step": 77.0, "kind": 1.0, "accuracy": 0.9, "loss": 3.0, "texts": 2.0}
    log = MetricsLog(tmp_path, build({}))
    log.log(1, with_own(row, own))
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {
            "step": 1, "kind": "train", "reward": 0.5, "loss": 0.1, "texts": 2.0, "log_metric/step": 77.0,
            "log_metric/kind": 1.0, "log_metric/accuracy": 0.9, "log_metric/loss": 3.0,
        }
    ]  # fmt: skip
