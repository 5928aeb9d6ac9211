"""Server processes. Each has its own session, so that stopping reaches its workers, and ends with us."""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.engines.servers.http import HttpClient
from whetstone.errors import UserError, is_out_of_memory, known_failure

logger = logging.getLogger("whetstone")

STOP_S = 20.0  # for a server to end by itself before it is killed
RESTARTS = 3  # of a server that dies again before it was ever up
LOG_END = 20_000  # characters of a log in which the reason of its end is searched
PR_SET_PDEATHSIG = 1
# PDEATHSIG refers to the thread that started the child: this one lives as long as the process.
_STARTER_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """How to start a server."""

    args: list[str]
    environment: dict[str, str]  # beside our own
    url: str


@dataclass
class ServerProcess:
    command: ServerCommand
    log: Path
    restarts: int = 0  # since it was last seen up
    process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A rank that shares its GPU claims to be a host (parallel/local_ranks.py); the server is none.
        inherited = {key: value for key, value in os.environ.items() if key != "NCCL_HOSTID"}
        with self.log.open("ab") as log:
            self.process = popen_with_pdeathsig(
                self.command.args,
                env={**inherited, **self.command.environment},
                cwd=self.log.parent,  # not where a folder might be taken for one of its packages
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_healthy(self) -> bool:
        return HttpClient(self.command.url).is_healthy()

    def restart_if_dead(self) -> None:
        """Start it again if it has died; `UserError` after several failures."""
        if self.is_running:
            return
        assert self.process is not None, "start comes first"
        if self.restarts >= RESTARTS:
            raise UserError(
                f"The server {self.command.url} ended {self.restarts + 1} times before it was up (exit code "
                f"{self.process.returncode}); its last words: {self.log_tail()} All of them are in "
                f"{self.log}.{self._meaning()}"
            )
        self.restarts += 1
        self._kill()  # workers that outlived it would hold its memory
        logger.warning(f"The server {self.command.url} has ended: starting it again ({self.log}).")
        self.start()

    def has_recovered(self) -> bool:
        """True once after a restart, when it answers again."""
        is_back = self.restarts > 0 and self.is_running and self.is_healthy
        self.restarts = 0 if is_back else self.restarts
        return is_back

    def wait_until_up(self, timeout_s: float) -> None:
        """Return once it answers; `UserError` with the end of its log if it ends or takes too long."""
        assert self.process is not None
        started_at = time.monotonic()
        while not self.is_healthy:
            if not self.is_running:
                raise UserError(
                    f"The server could not start (exit code {self.process.returncode}); its last words: "
                    f"{self.log_tail()} All of them are in {self.log}.{self._meaning()}"
                )
            if time.monotonic() - started_at > timeout_s:
                self.stop()
                raise UserError(
                    f"The server was not up after {timeout_s:g} s: raise server_timeout_s, or look into "
                    f"{self.log}, which ends with: {self.log_tail()}"
                )
            time.sleep(0.5)
        self.restarts = 0

    def log_tail(self) -> str:
        return error_lines(self._log_text(), 2)

    def _log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""

    def _meaning(self) -> str:
        """What the end of the server means and which setting to change; empty where it is not known."""
        assert self.process is not None
        text = self._log_text()[-LOG_END:]
        if self.process.returncode == -signal.SIGBUS:
            text += "\nbus error"
        meaning = known_failure(text)
        if meaning is None and is_out_of_memory(text):
            meaning = "Its GPU memory ran out: set server_gpu_memory_utilization or max_num_seqs lower"
        return "" if meaning is None else f" {meaning}."

    def stop(self) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                logger.info(f"The server {self.command.url} did not end by itself and is killed.")
        self._kill()

    def _kill(self) -> None:
        """Kill the rest of its session."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def popen_with_pdeathsig(args: list[str], **settings: Any) -> subprocess.Popen[Any]:
    """A process that ends with us, however we end (PR_SET_PDEATHSIG). `settings`: as for Popen."""
    return _STARTER_THREAD.submit(subprocess.Popen, args, preexec_fn=_set_pdeathsig, **settings).result()


def _set_pdeathsig() -> None:
    """In the child: SIGTERM when the parent dies, even by SIGKILL (Linux)."""
    # On another system only an ordinary end of ours stops it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def error_lines(text: str, num_lines: int = 1) -> str:
    """The most telling lines of an engine's output: failed checks of settings, else errors, else the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    checks = [line for line in lines if "Value error, " in line]
    errors = [line for line in lines if "Error" in line and "Traceback" not in line]
    return " | ".join((checks or errors or lines or ["nothing"])[-num_lines:])[-600:]
