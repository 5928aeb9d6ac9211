"""Talk: answers of a run's checkpoint, sampled in a process of its own. This process never loads a model."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.errors import UserError
from whetstone.inference.prompts import check_messages
from whetstone.model.manifest import NAME, Damage, read_manifest
from whetstone.run.checkpoint_folder import named_checkpoints, why_incomplete
from whetstone.run.record import read_mapping
from whetstone.sandbox.worker_process import WorkerProcess, available_cores

FINAL = "final_model"
LOAD_S, ANSWER_S, STOP_S, IDLE_S = 600.0, 300.0, 10.0, 300.0
POLL_S = 0.1  # between two looks at whether the answer was stopped
SILENT_S = 20.0  # a run whose status is older has died
MAX_TOKENS = 100_000  # that can be asked for
MAX_TEXT = 200_000  # characters of a conversation


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a page asks for. None: as the run does it."""

    checkpoint: Path
    messages: list[dict[str, str]]
    system: str | None
    temperature: float | None
    max_tokens: int | None
    seed: int
    beside: bool  # on the CPU, although a run trains on this machine


def checkpoints(run: Path) -> list[dict[str, Any]]:
    """Name and step of what can be sampled from, the newest first."""
    folders = [folder for folder in named_checkpoints(run) if why_incomplete(folder) is None]
    entries = [{"name": folder.name, "step": int(folder.name.rpartition("-")[2])} for folder in folders]
    with contextlib.suppress(Damage, OSError):
        entries.insert(0, {"name": FINAL, "step": read_manifest(run / FINAL).step})
    return entries


def why_no_checkpoint(run: Path) -> str:
    """Which key gives a checkpoint."""
    config = read_mapping(run / "config.yaml") or {}
    strategy, steps = config.get("save_strategy", "steps"), config.get("save_steps", 500)
    if strategy == "no":
        return (
            'This run writes no checkpoint while it runs (save_strategy: "no"), only final_model at its end: '
            "set save_strategy: steps and save_steps: 20 for the next one."
        )
    when = f"every {steps} steps (save_steps)" if strategy == "steps" else "after each epoch (save_strategy)"
    return f"This run has no checkpoint yet: it writes one {when}; a smaller save_steps gives one earlier."


def parse_question(document: Any, runs: Mapping[str, Path]) -> Question:
    """The body of a request, checked; a run and a checkpoint by name, so no other folder can be named."""
    if not isinstance(document, dict):
        raise UserError("The request is no JSON object.")
    run = runs.get(str(document.get("run")))
    if run is None:
        raise UserError("There is no such run in this folder: reload the page.")
    names = [entry["name"] for entry in checkpoints(run)]
    if not names:
        raise UserError(why_no_checkpoint(run))
    name = document.get("checkpoint") or names[0]
    if name not in names:
        raise UserError("The run has no such checkpoint any more: choose another one.")
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise UserError("The request has no messages: write a question.")
    messages, system = check_messages(messages), document.get("system")
    if system is not None and not isinstance(system, str):
        raise UserError("The system prompt is no text.")
    if sum(len(message["content"]) for message in messages) > MAX_TEXT:
        raise UserError(f"The conversation has more than {MAX_TEXT:,} characters: begin a new one.")
    max_tokens = _number(document, "max_tokens", 1, MAX_TOKENS)
    return Question(
        checkpoint=run / name,
        messages=messages,
        system=system,
        temperature=_number(document, "temperature", 0, 100),
        max_tokens=None if max_tokens is None else int(max_tokens),
        seed=int(_number(document, "seed", 0, 2**53) or 0),
        beside=document.get("beside") is True,
    )


def _number(document: dict[str, Any], key: str, low: float, high: float) -> float | None:
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"{key} must be a number from {low:g} to {high:g}.")
    return float(value)


def training_here(runs: Mapping[str, Path]) -> str | None:
    """The name of a run that trains on this machine now."""
    for name, folder in runs.items():
        status = read_mapping(folder / "status.json") or {}
        seen = status.get("time")
        is_fresh = isinstance(seen, int | float) and abs(time.time() - seen) < SILENT_S
        if status.get("state") == "running" and is_fresh and status.get("host") == socket.gethostname():
            return name
    return None


class Talk:
    """One answer at a time. The model stays loaded for a while, and goes when a run needs the device."""

    def __init__(
        self,
        find_runs: Callable[[], Mapping[str, Path]],
        *,
        answer_s: float = ANSWER_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._find_runs, self._answer_s, self._idle_s = find_runs, answer_s, idle_s
        self._busy = threading.Lock()
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._worker: WorkerProcess | None = None
        self._opened: tuple[Path, float, str] | None = None  # checkpoint, its time, the device asked for
        self._device = ""  # what it is loaded on
        self._used_at = 0.0
        self._reason = ""  # why the process was ended from here
        self._keeper: threading.Thread | None = None

    def state(self, run: Path) -> dict[str, Any]:
        """For the page: what can be asked, and what stands against it."""
        known = checkpoints(run)
        opened = self._opened
        return {
            "checkpoints": known,
            "reason": None if known else why_no_checkpoint(run),
            "training": training_here(self._find_runs()),
            "loaded": None if opened is None else str(opened[0].name),
        }

    def answer(self, document: Any) -> Generator[dict[str, Any]]:
        """Answer the body of a request: `stage`, `opened`, pieces of `text`, `end`; or `error`."""
        if not self._busy.acquire(timeout=1.0):
            yield {"error": "Another answer is being sampled: stop it first."}
            return
        try:
            self._stopping.clear()
            yield from self._events(parse_question(document, self._find_runs()))
        except UserError as error:
            yield {"error": str(error)}
        finally:
            self._used_at = time.monotonic()
            self._busy.release()

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        """End the process of the model, if there is one."""
        self._closing.set()
        self.unload("the viewer ends")

    def unload(self, reason: str = "somebody asked for it") -> None:
        """Free the device at once, whatever is being sampled."""
        worker, self._reason = self._worker, reason
        if self._busy.acquire(blocking=False):
            self._unload()
            self._busy.release()
        elif worker is not None:  # who reads its answer notices
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)

    def _unload(self) -> None:
        """Only for the thread that has `_busy`: nobody else reads from the process."""
        worker, self._worker, self._opened = self._worker, None, None
        if worker is not None:
            worker.close()

    def _events(self, question: Question) -> Iterator[dict[str, Any]]:
        device = self._choose_device(question.beside)
        checkpoint = question.checkpoint
        identity = (checkpoint, (checkpoint / NAME).stat().st_mtime, device)  # a run may write it anew
        if self._worker is None or self._opened != identity:
            self._unload()
            yield {"stage": f"loading {checkpoint.name}"}
            yield self._load(checkpoint, device)
            self._opened = identity
            self._keep()
        settings = {
            "messages": question.messages,
            "system": question.system,
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "seed": question.seed,
        }
        self._send({"do": "answer", "settings": settings})
        is_over = False
        try:
            for event in self._receive(self._answer_s):
                is_over = "end" in event or "error" in event
                yield event
        finally:
            if not is_over:  # the page is gone
                self._unload()

    def _choose_device(self, beside: bool) -> str:
        name = training_here(self._find_runs())
        if name is None:
            return "auto"
        if not beside:
            raise UserError(
                f"The run {name} trains on this machine: wait until it has ended, or sample beside it on the "
                "CPU, which slows it down."
            )
        return "cpu"

    def _load(self, checkpoint: Path, device: str) -> dict[str, Any]:
        self._worker, self._reason = WorkerProcess("whetstone.watch.talk_process:serve"), ""
        cores = available_cores()
        settings = {
            "checkpoint": str(checkpoint),
            "device": device,
            "num_threads": max(1, cores // 2) if device == "cpu" else cores,
        }
        self._send({"do": "open", "settings": settings})
        event = next(self._receive(LOAD_S, is_loading=True))
        if "error" in event:
            self._unload()
            raise UserError(event["error"])
        self._device = event["opened"]["device"]
        return event

    def _keep(self) -> None:
        if self._keeper is None or not self._keeper.is_alive():
            self._keeper = threading.Thread(target=self._watch_over, name="talk", daemon=True)
            self._keeper.start()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._worker is not None
        try:
            self._worker.connection.send(message)
        except OSError:
            raise UserError(self._why_ended()) from None

    def _receive(self, limit_s: float, *, is_loading: bool = False) -> Iterator[dict[str, Any]]:
        """The events of a request up to its last. A stop ends an answer, and the process that loads."""
        assert self._worker is not None
        deadline, is_late, is_asked = time.monotonic() + limit_s, False, False
        while True:
            is_late = is_late or (not is_asked and time.monotonic() > deadline)
            if not is_asked and (is_late or self._stopping.is_set()):
                if is_loading:
                    self._unload()
                    raise UserError(f"Loading took more than {limit_s:g} s." if is_late else "Stopped.")
                is_asked, deadline = True, time.monotonic() + STOP_S
                self._send({"do": "stop"})
            elif is_asked and time.monotonic() > deadline:
                self._unload()
                raise UserError("The process of the model did not stop, so it was ended: ask again.")
            try:
                if not self._worker.connection.poll(POLL_S):
                    continue
                event = self._worker.connection.recv()
            except (EOFError, OSError):
                raise UserError(self._why_ended()) from None
            if is_late and "end" in event:
                event["end"]["finish"] = f"stopped after {limit_s:g} s"
            if event.pop("is_fatal", False):
                self._unload()
            yield event
            if "end" in event or "error" in event:
                return

    def _why_ended(self) -> str:
        assert self._worker is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._worker.process.wait(timeout=5)
        code, reason = self._worker.process.returncode, self._reason
        self._unload()
        if reason:
            return f"The model was unloaded: {reason}."
        cause = "it was killed, as when memory runs out" if code == -signal.SIGKILL else f"exit code {code}"
        return f"The process of the model ended ({cause}). The run and this page are not affected: ask again."

    def _watch_over(self) -> None:
        """Unload a model that is not used, or that is on a device which a run needs now."""
        while self._opened is not None and not self._closing.wait(1.0):
            if self._busy.acquire(blocking=False):
                if time.monotonic() - self._used_at > self._idle_s:
                    self._unload()
                self._busy.release()
            if self._device != "cpu" and training_here(self._find_runs()) is not None:
                self.unload("a run has begun to train on this machine")
