# ruff: noqa: E501
"""Reward functions that a user could write by mistake: the run ends in a sentence, or goes on and counts
them.

Each is a file of its own. Where only some calls fail, a run may go on (exit code 0); it never hangs, never
shows a traceback of the package, and leaves no process.
"""

from tests.torture.inputs import TINY, Case

HEAD = "import os, sys, time, math, random, threading, signal\n\n\ndef f(prompts, completions, **columns):\n    n = len(completions)\n"

# name -> body of the function; all of these fail on every answer.
ALWAYS = {
    "raises": "raise ValueError('no')",
    "raises a strange error": "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises SystemExit": "raise SystemExit(0)",
    "exits": "os._exit(0)",
    "exits with 7": "os._exit(7)",
    "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "aborts": "os.abort()",
    "sleeps": "time.sleep(1000)",
    "never ends": "while True: pass",
    "returns nothing": "pass",
    "returns a text": "return 'good'",
    "returns texts": "return ['good'] * n",
    "returns nested lists": "return [[1.0]] * n",
    "returns NaN": "return [math.nan] * n",
    "returns infinity": "return [math.inf] * n",
    "returns too many": "return [1.0] * (n + 1)",
    "returns too few": "return [1.0] * (n - 1)",
    "returns an endless generator": "return (1.0 for _ in iter(int, 1))",
    "returns a huge int": "return [10 ** 400] * n",
    "returns complex numbers": "return [1j] * n",
    "returns a dict": "return {'reward': 1.0}",
    "returns itself": "return f",
    "recurses": "return f(prompts, completions, **columns)",
    "takes all memory": "return [len(bytearray(1 << 40))] * n",
    "closes every descriptor": "os.closerange(3, 1000); return [1.0] * n",
    "writes into every descriptor": "for fd in range(3, 64):\n        try: os.write(fd, b'x' * 64)\n        except OSError: pass\n    return [1.0] * n",
}
# These may well go on.
SOMETIMES = {
    "returns None for some": "return [None if i % 2 else 1.0 for i in range(n)]",
    "returns huge values": "return [1e308, -1e308] * n",
    "forks": "pid = os.fork()\n    if pid == 0: os._exit(0)\n    return [1.0] * n",
    "forks and both return": "os.fork()\n    return [1.0] * n",
    "leaves a thread": "threading.Thread(target=time.sleep, args=(1000,)).start()\n    return [1.0] * n",
    "prints a lot": "print('x' * 1_000_000)\n    sys.stderr.write('y' * 1_000_000)\n    return [1.0] * n",
    "prints control characters": "print('\\x1b[2J\\x00\\ud800'.encode('utf-8', 'replace'))\n    return [1.0] * n",
    "closes stdout": "os.close(1); os.close(2)\n    return [1.0] * n",
    "changes the folder": "os.chdir('/')\n    return [1.0] * n",
    "logs a lone surrogate": "columns.get('log_extra', lambda *a: 0)('x', ['\\ud800'] * n)\n    return [1.0] * n",
    "logs NaN": "columns.get('log_metric', lambda *a: 0)('x', math.nan)\n    return [1.0] * n",
    "changes its arguments": "completions.clear(); prompts.clear()\n    return [1.0] * n",
    "sets limits": "import resource\n    resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\n    return [1.0] * n",
    "takes signals": "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    return [1.0] * n",
    "seeds everything": "random.seed(0)\n    return [random.random() for _ in range(n)]",
}
# What is wrong before anything is called.
FILES = {
    "empty file": "",
    "no such function": "def g(**columns): return []\n",
    "not Python": "def f(:\n",
    "not UTF-8": b"# \xff\xfe\ndef f(**columns): return []\n",
    "a null byte": b"def f(**columns): return []\x00\n",
    "no function but a number": "f = 3\n",
    "a class": "class f:\n    pass\n",
    "raises when imported": "raise RuntimeError('no')\n",
    "exits when imported": "import sys; sys.exit(0)\n",
    "ends when imported": "import os; os._exit(0)\n",
    "hangs when imported": "import time; time.sleep(1000)\n",
    "imports what is not there": "import no_such_module_at_all\ndef f(**columns): return []\n",
    "imports itself": "import bad\ndef f(**columns): return [bad.f] * 3\n",
    "takes no arguments": "def f(): return []\n",
    "takes one argument": "def f(x): return [1.0]\n",
    "needs a column that is not there": "def f(completions, no_such_column, **columns): return [1.0] * len(completions)\n",
    "is asynchronous": "async def f(completions, **columns): return [1.0] * len(completions)\n",
    "is a generator": "def f(completions, **columns):\n    for _ in completions: yield 1.0\n",
    "nested too deeply": "f = " + "(" * 5000 + "1" + ")" * 5000 + "\n",
}


def cases() -> list[Case]:
    words = [word for word in TINY if not word.startswith(("reward_funcs", "prompts_per_step", "max_steps"))]
    argv = [
        "train",
        *words,
        "reward_funcs=[bad.py:f]",
        "prompts_per_step=2",
        "max_steps=2",
        "reward_timeout_s=2",
    ]

    def case(name: str, source: str | bytes, codes: tuple[int, ...]) -> Case:
        return Case(name=name, argv=argv, files={"bad.py": source}, codes=codes, limit_s=150)

    return [
        *(case(name, f"{HEAD}    {body}\n", (2,)) for name, body in ALWAYS.items()),
        *(case(name, f"{HEAD}    {body}\n", (0, 2)) for name, body in SOMETIMES.items()),
        *(
            case(name, source, (0, 2) if name in ("is a generator", "is asynchronous") else (2,))
            for name, source in FILES.items()
        ),
    ]
