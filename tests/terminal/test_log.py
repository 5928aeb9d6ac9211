"""training.log: what ended the run, what libraries say, and no control character of a model's."""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich
import transformers
from rich.console import Console

from whetstone.errors import UserError
from whetstone.evaluation.display import print_result
from whetstone.evaluation.evaluator import EvalRecord, EvalResult
from whetstone.evaluation.statistics import accuracy
from whetstone.model.hub import resolve
from whetstone.terminal.log import LIBRARIES, log_ending, setup_logging

HOSTILE = "\x1b[2J\x1b]0;owned\x07ok\rfake \u202egnorw [bold]b[/bold] [/oops] \x9b5m \ud83d"


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    names = ("whetstone", *LIBRARIES)
    before = {
        name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in names
    }
    yield
    for name, (handlers, propagate) in before.items():
        logger = logging.getLogger(name)
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate


def is_clean(text: str) -> bool:
    return not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


def answered(text: str) -> EvalRecord:
    return EvalRecord(
        problem="x/eval/0",
        task="x",
        sample=0,
        messages=({"role": "user", "content": text},),
        gold=text,
        completion=text,
        answer=text,
        correct=False,
        parts={"correct": 0.0},
        length=3,
        finish="stop",
        failure=None,
    )


def test_completions_reach_terminal_and_log_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(rich, "_console", Console(file=out, width=200))
    logger = setup_logging(tmp_path)
    logger.warning("%s", HOSTILE)
    share = accuracy([[False]])
    result = EvalResult(
        step=0,
        temperature=1.0,
        samples_per_problem=1,
        accuracy=share,
        reward=share,
        greedy_accuracy=None,
        pass_at_k={},
        per_task={},
        mean_length=3.0,
        clipped_ratio=0.0,
        num_failures=0,
        delta_vs_step0=None,
        completions=(answered(HOSTILE),),
        greedy_completions=(),
    )
    print_result(result, num_examples=1)
    logged = (tmp_path / "training.log").read_text()
    for text in (out.getvalue(), logged):
        assert is_clean(text)
        assert "\\x1b[2J" in text and "[bold]b[/bold] [/oops]" in text  # seen, and not taken for markup
    assert out.getvalue().count("\\u202e") >= 4  # message, question, completion, answer


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (UserError("The data is gone: bring it back."), "ERROR   The data is gone: bring it back."),
        (KeyboardInterrupt(), "INFO    Stopped by"),
        (ZeroDivisionError("ours"), "ZeroDivisionError: ours"),
        (SystemExit(3), "exit code 3"),
    ],
)
def test_the_sentence_that_ends_a_run_is_in_its_log(
    tmp_path: Path, error: BaseException, logged: str
) -> None:
    with pytest.raises(type(error)), contextlib.ExitStack() as stack:
        setup_logging(tmp_path)
        stack.push(log_ending)
        raise error
    text = (tmp_path / "training.log").read_text()
    assert logged in text
    assert ("Traceback" in text) == isinstance(error, ZeroDivisionError)


def test_a_run_that_ends_well_logs_no_ending(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        setup_logging(tmp_path)
        stack.push(log_ending)
    assert (tmp_path / "training.log").read_text() == ""


def test_library_messages_go_to_the_log_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve("pebble"), model_max_length=16)
    tokenizer("how many letters are in this text, which is longer than sixteen tokens? " * 4)
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)  # other tests may have quietened it
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s [Retry 5/5].")
    text = (tmp_path / "training.log").read_text()
    assert "sequence length is longer" in text and "Retry 5/5" in text
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training.log").symlink_to("/dev/full")
    logger = setup_logging(tmp_path)
    logger.handlers[1].close()
    logging.getLogger("whetstone.steps").info("a line")
    assert "Logging error" not in capfd.readouterr().err
