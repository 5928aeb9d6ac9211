"""Environments that misbehave, one class for each way."""

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path


class Good:
    def reset(self, seed: int) -> str:
        return f"say {seed}"

    def step(self, text: str):
        won = text == "yes"
        return "ok", float(won), True, False, {"correct": won}


class ResetHangs(Good):
    def reset(self, seed: int) -> str:
        time.sleep(600)
        return ""


class ResetRaises(Good):
    def reset(self, seed: int) -> str:
        raise RuntimeError("no such level")


class ResetExits(Good):
    def reset(self, seed: int) -> str:
        os._exit(3)


class ConstructorRaises(Good):
    def __init__(self):
        raise ValueError("bad settings")


class StepHangs(Good):
    def step(self, text: str):
        time.sleep(600)


class StepSpins(Good):
    def step(self, text: str):
        while True:
            pass


class StepRaises(Good):
    def step(self, text: str):
        return {}["missing"]


class StepExits(Good):
    def step(self, text: str):
        os._exit(0)


class StepCallsExit(Good):
    def step(self, text: str):
        sys.exit("bye")


class StepKillsItself(Good):
    def step(self, text: str):
        os.kill(os.getpid(), signal.SIGKILL)


class StepKillsItsGroup(Good):
    def step(self, text: str):
        os.killpg(0, signal.SIGKILL)


class StepOverflowsTheStack(Good):
    def step(self, text: str):
        return self.step(text)


class ReturnsNone(Good):
    def step(self, text: str):
        return None


class ReturnsText(Good):
    def step(self, text: str):
        return "ok"


class ReturnsFourValues(Good):
    def step(self, text: str):
        return "ok", 1.0, True, {}


class RewardIsText(Good):
    def step(self, text: str):
        return "ok", "a lot", True, False, {}


class RewardIsNan(Good):
    def step(self, text: str):
        return "ok", float("nan"), True, False, {}


class RewardIsInfinite(Good):
    def step(self, text: str):
        return "ok", float("inf"), True, False, {}


class HugeObservation(Good):
    def step(self, text: str):
        return "x" * (64 << 20), 0.0, False, False, {}


class TakesMemory(Good):
    def step(self, text: str):
        return str(len(bytearray(4 << 30))), 1.0, True, False, {}


class ClosesEverything(Good):
    def step(self, text: str):
        os.closerange(0, 1024)
        return "ok", 1.0, True, False, {}


class WritesToEverything(Good):
    def step(self, text: str):
        for file in range(3, 64):
            try:
                os.write(file, b"\xff" * 64)
            except OSError:
                continue
        return "ok", 1.0, True, False, {}


class RaisesOddly(Good):
    def step(self, text: str):
        class Odd(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Odd


class TextRaises(Good):
    def step(self, text: str):
        class Odd:
            def __str__(self) -> str:
                raise RuntimeError("no text")

        return Odd(), 0.0, False, False, {}


class LeavesThreads(Good):
    def step(self, text: str):
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(600,)).start()
        return super().step(text)


class Forks(Good):
    def step(self, text: str):
        if os.fork() == 0:
            time.sleep(600)
        return super().step(text)


class ChangesItsSignature(Good):
    def step(self, text: str):
        self.__dict__["step"] = lambda: None
        return "again", 0.0, False, False, {}


class InfoIsText(Good):
    def step(self, text: str):
        return "ok", 1.0, True, False, "won"


class Prints(Good):
    def step(self, text: str):
        sys.stdout.write("noise" * 1000)
        return super().step(text)


class SurrogateText(Good):
    def step(self, text: str):
        return "\ud800 \x00 \u202e", 1.0, True, False, {}


class ChangesFolder(Good):
    def step(self, text: str):
        os.chdir("/")
        return super().step(text)


class ForksMany(Good):
    """Forty processes, each of which would go on forking."""

    def step(self, text: str):
        for _ in range(40):
            if os.fork() == 0:
                while True:
                    time.sleep(5)
                    os.fork()
        return super().step(text)


class LeavesADaemon(Good):
    """A process in a session of its own, whose parent has ended."""

    def step(self, text: str):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(tempfile.gettempdir(), "daemon").write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        return super().step(text)


class ClearsTheEnvironment(Good):
    def step(self, text: str):
        os.environ.clear()
        sys.path.clear()
        return super().step(text)


class StopsItself(Good):
    def step(self, text: str):
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(text)


class SetsAnAlarm(Good):
    def step(self, text: str):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(600)


class IgnoresSignals(Good):
    def step(self, text: str):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        return super().step(text)


class RaisesKeyboardInterrupt(Good):
    def step(self, text: str):
        raise KeyboardInterrupt


class CrashesInC(Good):
    def step(self, text: str):
        import ctypes

        ctypes.string_at(1)


class OpensManyFiles(Good):
    def step(self, text: str):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        self.files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1000)]


class FloodsItsOutput(Good):
    def step(self, text: str):
        with open(os.devnull, "w") as file:
            os.dup2(file.fileno(), 1)
        for _ in range(64):
            os.write(1, b"x" * (1 << 20))
        return super().step(text)


class PatchesJson(Good):
    def step(self, text: str):
        json.dumps = lambda *args, **options: "nonsense"
        return super().step(text)


class InfoRaises(Good):
    def step(self, text: str):
        class Odd(dict):
            def get(self, *args):
                raise RuntimeError("no info")

        return "ok", 1.0, True, False, Odd()


class TruthRaises(Good):
    def step(self, text: str):
        class Odd:
            def __bool__(self) -> bool:
                raise RuntimeError("neither true nor false")

        return "ok", 1.0, Odd(), False, {}


class LosesItsStep(Good):
    def reset(self, seed: int) -> str:
        self.step = None  # type: ignore[assignment,method-assign]
        return "say something"


class SignatureOfReset(Good):
    def reset(self, level: str) -> str:  # nobody gives it a level
        return level


# Class -> part of the reason that is named; None: the episode goes on as if nothing had happened.
REASONS = {
    ResetHangs: "no answer in", ResetRaises: "no such level", ResetExits: "has ended",
    ConstructorRaises: "bad settings", StepHangs: "no answer in", StepSpins: "no answer in",
    StepRaises: "missing", StepExits: "has ended", StepCallsExit: "has ended", StepKillsItself: "has ended",
    StepKillsItsGroup: "has ended", StepOverflowsTheStack: "recursion", ReturnsNone: "None instead of",
    ReturnsText: "a str instead of", ReturnsFourValues: "a tuple of 4 instead", RewardIsText: "as the reward",
    RewardIsNan: "the reward nan", RewardIsInfinite: "the reward inf", HugeObservation: "characters",
    TakesMemory: "out of memory", ClosesEverything: "has ended", WritesToEverything: "bytes",
    RaisesOddly: "Odd", TextRaises: "no text", LeavesThreads: None, Forks: None,
    ChangesItsSignature: "argument", InfoIsText: None, Prints: None, SurrogateText: None, ChangesFolder: None,
    ForksMany: None, LeavesADaemon: None, ClearsTheEnvironment: None, StopsItself: "no answer in",
    SetsAnAlarm: "has ended", IgnoresSignals: None, RaisesKeyboardInterrupt: "has ended",
    CrashesInC: "has ended", OpensManyFiles: "Too many open files", FloodsItsOutput: None,
    PatchesJson: "no JSON", InfoRaises: "no info", TruthRaises: "neither true nor false",
    LosesItsStep: "not callable", SignatureOfReset: "level",
}  # fmt: skip
