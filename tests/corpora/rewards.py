"""Bad reward functions, each with what must happen to a run that names it.

A plain module without pytest. `write(folder)` writes one file per case and yields the cases; `command` makes
the run of a case. Whatever a function does, a run never hangs, never shows a traceback and leaves no process
behind:

- REFUSED: the run ends at its start, before a model is loaded, with exit code 2 and one sentence;
- STOPPED: the run ends with exit code 2 and one sentence, since scoring fails on too many answers;
- GOES_ON: the run ends with exit code 0; the answers that failed are counted in `scoring_failures`.
- ANY: both exit codes are right, as long as the reason is told.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REFUSED, STOPPED, GOES_ON, ANY = "refused", "stopped", "goes on", "any"
CODES = {REFUSED: (2,), STOPPED: (2,), GOES_ON: (0,), ANY: (0, 2)}


class Case(NamedTuple):
    """A reward function `spec` and what must happen."""

    name: str
    spec: str
    outcome: str
    is_slow: bool = False  # it hangs: the run takes as long as the time limits

    @property
    def codes(self) -> tuple[int, ...]:
        return CODES[self.outcome]


def command(case: Case, output_dir: Path, *, num_steps: int = 2) -> list[str]:
    """The arguments of `whet` for a small run that pays by this function."""
    return [
        *("train", "model_name_or_path=pebble", "datasets={chain_sum: {}}", "eval_num_samples=0"),
        *(f"max_steps={num_steps}", "prompts_per_step=4", "num_generations=4", "max_completion_length=16"),
        *(f"reward_funcs=[{case.spec}]", "reward_workers=1", "reward_timeout_s=2", "save_strategy=no"),
        *(f"output_dir={output_dir}", "run_name=run", "overwrite_output_dir=true", "preflight=off"),
    ]


def write(folder: Path) -> Iterator[Case]:
    """Write every file and yield the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for outcome, sources in ((REFUSED, _IMPORTS), (STOPPED, _ALWAYS), (GOES_ON, _SOMETIMES), (ANY, _ODD)):
        for name, source in sources.items():
            number += 1
            path = folder / f"reward_{number:02d}.py"
            path.write_bytes(source if isinstance(source, bytes) else source.encode("utf-8"))
            yield Case(
                name, f"{path}:reward", outcome, "sleep(" in str(source) or "while True" in str(source)
            )
    (folder / "a_folder.py").mkdir(exist_ok=True)
    for name, spec in {
        "no file": f"{folder / 'absent.py'}:reward",
        "a folder": f"{folder / 'a_folder.py'}:reward",
        "no module": "no_such_module_anywhere:reward",
        "no name": f"{folder / 'reward_01.py'}:",
        "a name with a space": f"{folder / 'reward_01.py'}:re ward",
        "no colon": "reward_01.py",
        "nothing but a colon": "':'",
    }.items():
        yield Case(name, spec, REFUSED)


def _returns(expression: str, before: str = "") -> str:
    return f"{before}\ndef reward(completions, **columns):\n    return {expression}\n"


def _does(*lines: str, before: str = "") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"{before}\ndef reward(completions, **columns):\n{body}"


_GOOD = "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"

# found while importing
_IMPORTS: dict[str, str | bytes] = {
    "no Python": "def reward(:\n",
    "no text": b"\xff\xfe\x00reward",
    "a NUL byte": b"def reward(completions):\0 pass\n",
    "an empty file": "",
    "another function": "def rewrad(completions):\n    return [0.0]\n",
    "no function": "reward = 3\n",
    "a module in its place": "import math as reward\n",
    "no parameters": "def reward():\n    return []\n",
    "by place only": "def reward(completions, /):\n    return [0.0] * len(completions)\n",
    "an import that is missing": "import no_such_module_anywhere\n" + _GOOD,
    "an import that raises": "raise RuntimeError('no\\nlicence')\n" + _GOOD,
    "an import that divides by zero": "1 / 0\n" + _GOOD,
    "an import that exits": "import sys\nsys.exit(3)\n" + _GOOD,
    "an import that exits with 0": "import sys\nsys.exit(0)\n" + _GOOD,
    "an import that exits hard": "import os\nos._exit(0)\n" + _GOOD,
    "an import that kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + _GOOD,
    "an import that crashes": "import ctypes\nctypes.string_at(0)\n" + _GOOD,
    "an import that recurses": "def f(): f()\nf()\n" + _GOOD,
    "an import that hangs": "import time\ntime.sleep(3600)\n" + _GOOD,
    "an import that loops": "while True: pass\n" + _GOOD,
    "an import that stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nx = 'sleep('\n"
    + _GOOD,
    "an import that is interrupted": "raise KeyboardInterrupt\n" + _GOOD,
    "an import that reads its input": "input('name? ')\n" + _GOOD,
    "a cycle of imports": "from reward_24 import reward, nothing\n" + _GOOD,
    "a surrogate in its error": "raise ValueError('\\ud800')\n" + _GOOD,
}
# fails on every answer
_ALWAYS: dict[str, str | bytes] = {
    "returns large values": _returns("[(-1.0) ** i * 1e30 for i in range(len(completions))]"),
    "returns None for some": _returns("[None if i % 2 else 1.0 for i in range(len(completions))]"),
    "raises": _does("raise KeyError('no such thing')"),
    "raises without a text": _does("raise ValueError"),
    "raises a text of many lines": _does("raise ValueError('a\\n' * 1000)"),
    "raises a surrogate": _does("raise ValueError('\\ud800')"),
    "fails an assertion": _does("assert False"),
    "exits": _does("raise SystemExit(3)"),
    "exits with 0": _does("raise SystemExit(0)"),
    "exits hard": _does("import os", "os._exit(0)"),
    "kills itself": _does("import os, signal", "os.kill(os.getpid(), signal.SIGKILL)"),
    "crashes": _does("import ctypes", "ctypes.string_at(0)"),
    "recurses": _does("return reward(completions)"),
    "hangs": _does("import time", "time.sleep(3600)"),
    "loops": _does("while True: pass"),
    "hangs without signals": _does(
        "import signal, time", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))", "time.sleep(3600)"
    ),
    "stops itself": _does("import os, signal", "os.kill(os.getpid(), signal.SIGSTOP)", "x = 'sleep('"),
    "is interrupted": _does("raise KeyboardInterrupt"),
    "returns nothing": _does("pass"),
    "returns a number": _returns("1.0"),
    "returns a text": _returns("'1' * len(completions)"),
    "returns a mapping": _returns("{i: 1.0 for i in range(len(completions))}"),
    "returns a set": _returns("{1.0}"),
    "returns too few": _returns("[1.0] * (len(completions) - 1)"),
    "returns too many": _returns("[1.0] * (len(completions) + 1)"),
    "returns an empty list": _returns("[]"),
    "returns texts": _returns("['good'] * len(completions)"),
    "returns lists": _returns("[[1.0]] * len(completions)"),
    "returns objects": _returns("[object()] * len(completions)"),
    "returns complex numbers": _returns("[1j] * len(completions)"),
    "returns nan": _returns("[float('nan')] * len(completions)"),
    "returns inf": _returns("[float('inf')] * len(completions)"),
    "returns a number beyond floats": _returns("[10**400] * len(completions)"),
    "returns an array of one axis too many": _returns("numpy.ones((len(completions), 2))", "import numpy"),
    "is a generator": _does("yield 1.0"),
    "wants a column that is not there": "def reward(completions, colour):\n    return [1.0, 1.0]\n",
    "awaits for ever": "import asyncio\nasync def reward(completions):\n    await asyncio.sleep(3600)\n",
    "takes all memory": _does("hold = [bytearray(2**30) for _ in range(10**4)]", "return hold"),
}
# fails on some answers, or does what it should not and is right all the same
_SOMETIMES: dict[str, str | bytes] = {
    "raises once": _does(
        "import pathlib",
        "mark = pathlib.Path(__file__ + '.mark')",
        "first = not mark.exists()",
        "mark.touch()",
        "if first: raise OSError('once')",
        "return [1.0] * len(completions)",
    ),
    "prints": _does("print('x' * 10**5)", "return [1.0] * len(completions)"),
    "writes to every descriptor but its files": _does(
        "import sys", "sys.stderr.write('noise\\n')", "return [1.0] * len(completions)"
    ),
    "closes stdout": _does("import sys", "sys.stdout.close()", "return [1.0] * len(completions)"),
    "forks and waits": _does(
        "import os",
        "child = os.fork()",
        "if child == 0: os._exit(0)",
        "os.waitpid(child, 0)",
        "return [1.0] * len(completions)",
    ),
    "starts a thread": _does(
        "import threading",
        "threading.Thread(target=print, daemon=True).start()",
        "return [1.0] * len(completions)",
    ),
    "changes the working directory": _does("import os", "os.chdir('/')", "return [1.0] * len(completions)"),
    "changes its arguments": _does(
        "values = [1.0] * len(completions)", "completions.clear()", "return values"
    ),
    "returns booleans": _returns("[True] * len(completions)"),
    "returns a tuple": _returns("(1.0,) * len(completions)"),
    "returns an array": _returns("numpy.ones(len(completions))", "import numpy"),
    "logs what it likes": (
        "def reward(completions, log_extra, log_metric, **columns):\n"
        "    log_metric('a/b', 1)\n    log_extra('x', [None] * len(completions))\n"
        "    return [1.0] * len(completions)\n"
    ),
    "a class": (
        "class Reward:\n    def __call__(self, completions, **columns):\n"
        "        return [1.0] * len(completions)\nreward = Reward()\n"
    ),
    "a partial function": (
        "import functools\ndef pay(completions, much, **columns):\n    return [much] * len(completions)\n"
        "reward = functools.partial(pay, much=1.0)\n"
    ),
}
# told, whatever the run does
_ODD: dict[str, str | bytes] = {
    "returns None for all": _returns("[None] * len(completions)"),
    "returns huge values": _returns("[1.7e308] * len(completions)"),
    "returns huge values of both signs": _returns(
        "[1.7e308 if i % 2 else -1.7e308 for i in range(len(completions))]"
    ),
    "logs a lone surrogate": (
        "def reward(completions, log_extra, log_metric, **columns):\n"
        "    log_extra('\\ud800', ['\\udfff'] * len(completions))\n    log_metric('\\ud800', 1.0)\n"
        "    return [1.0] * len(completions)\n"
    ),
    "logs what is no number": (
        "def reward(completions, log_metric, **columns):\n    log_metric('a', 'many')\n"
        "    return [1.0] * len(completions)\n"
    ),
    "logs nan": (
        "def reward(completions, log_metric, **columns):\n    log_metric('a', float('nan'))\n"
        "    return [1.0] * len(completions)\n"
    ),
    "logs an object": (
        "def reward(completions, log_extra, **columns):\n    log_extra('a', [object()] * len(completions))\n"
        "    return [1.0] * len(completions)\n"
    ),
    "logs a generator that raises": (
        "def reward(completions, log_extra, **columns):\n    log_extra('a', (1 / 0 for _ in completions))\n"
        "    return [1.0] * len(completions)\n"
    ),
    "forks and both return": _does("import os", "os.fork()", "return [1.0] * len(completions)"),
    "forks a process that stays": _does(
        "import os, time", "if os.fork() == 0:", "    time.sleep(3600)", "return [1.0] * len(completions)"
    ),
    "writes to every pipe": _does(
        "import os",
        "for fd in range(3, 64):",
        "    try: os.write(fd, b'\\0\\0\\0\\4junk')",
        "    except OSError: pass",
        "return [1.0] * len(completions)",
    ),
    "closes every descriptor": _does("import os", "os.closerange(3, 256)", "return [1.0] * len(completions)"),
    "reads every pipe": _does(
        "import os",
        "for fd in range(3, 64):",
        "    try: os.set_blocking(fd, False); os.read(fd, 100)",
        "    except OSError: pass",
        "return [1.0] * len(completions)",
    ),
    "ignores termination": _does(
        "import os, signal",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "return [1.0] * len(completions)",
    ),
    "leaves a thread that raises": _does(
        "import threading",
        "threading.Thread(target=lambda: 1 / 0).start()",
        "return [1.0] * len(completions)",
    ),
    "sets an alarm": _does("import signal", "signal.alarm(1)", "return [1.0] * len(completions)"),
    "a float that is none": (
        "class Odd(float):\n    def __float__(self): raise ValueError('odd')\n"
        + _returns("[Odd(1)] * len(completions)")
    ),
    "a list that lies": (
        "class Odd(list):\n    def __len__(self): return 10**9\n" + _returns("Odd([1.0] * len(completions))")
    ),
    "removes our modules": _does(
        "import sys",
        "[sys.modules.pop(name) for name in list(sys.modules) if 'whetstone' in name]",
        "return [1.0] * len(completions)",
    ),
}
