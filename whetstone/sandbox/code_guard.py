"""An audit hook that prevents text from becoming code.

Processes that hand a model's answer to third-party parsers install it: some parsers call `eval` (sympy's
`parse_expr`, scorers of reasoning-gym). The hook inspects each code object made from text before it runs.
Numbers, operators and calls of known mathematical functions pass; everything else raises. The hook also
refuses what no scorer needs: processes, sockets, file writes, foreign libraries, unpickling. An audit hook
cannot be removed. It is the first layer; the process is isolated as well (`isolate.py`), so that a gap here
costs a wrong score and nothing else.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = frozenset(
    """
    os.system os.exec os.posix_spawn os.spawn os.startfile os.fork os.forkpty os.kill os.killpg
    os.remove os.rename os.mkdir os.rmdir os.chmod os.chown os.chflags os.link os.symlink os.truncate
    os.utime os.setxattr os.removexattr os.putenv os.unsetenv os.chdir os.fchdir subprocess.Popen
    pty.spawn socket.connect socket.bind socket.sendto socket.sendmsg socket.getaddrinfo
    socket.gethostbyname ctypes.dlopen ctypes.dlsym ctypes.call_function ctypes.cdata ctypes.string_at
    pickle.find_class shutil.copyfile shutil.move shutil.rmtree shutil.copytree shutil.make_archive
    tempfile.mkstemp tempfile.mkdtemp sys.addaudithook sys.settrace sys.setprofile code.__new__
    function.__new__ object.__setattr__ object.__delattr__ gc.get_objects gc.get_referrers
    gc.get_referents signal.pthread_kill mmap.__new__ sqlite3.connect urllib.Request webbrowser.open
    """.split()  # noqa: SIM905
)
# What an expression that sympy evaluates may name: its constructors, functions and constants.
_NAMES = frozenset(
    """
    Symbol Integer Float Rational Function Add Mul Pow Min Max Abs Mod Matrix Tuple Eq Ne Lt Le Gt Ge
    And Or Not Interval FiniteSet Union EmptySet Derivative Integral Sum Product Piecewise GoldenRatio
    EulerGamma sin cos tan cot sec csc sinc asin acos atan acot asec acsc atan2 sinh cosh tanh coth sech
    csch asinh acosh atanh acoth asech acsch exp log ln sqrt cbrt root sign floor ceiling frac factorial
    factorial2 binomial gamma loggamma beta zeta erf erfc erfi Ei Si Ci li Li re im arg conjugate gcd
    lcm pi oo zoo nan
    """.split()  # noqa: SIM905
)
_SYMPY_IMPORT = compile("from sympy import *", "<string>", "exec")  # what `parse_expr` runs first
_VARIABLE = re.compile(r"[A-Za-z][0-9]?|theta|phi|alpha|lambda_")

_installed = False
_trusted = 0
num_refused = 0  # how often text or code was refused in this process


class RefusedCode(Exception):
    """Text was about to run as code, or code asked for what a scorer does not need."""


def install() -> None:
    """From now on, and for the rest of this process and its forks. May be called twice."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)


@contextmanager
def trusted() -> Iterator[None]:
    """While this process does its own work: reads a job of the pool, forks, ends a fork."""
    global _trusted
    _trusted += 1
    try:
        yield
    finally:
        _trusted -= 1


def is_harmless(code: CodeType) -> bool:
    """Whether a code object only computes with numbers, text, lists and known functions."""
    if (code.co_code, code.co_names) == (_SYMPY_IMPORT.co_code, _SYMPY_IMPORT.co_names):
        return True
    named = all(name in _NAMES or _VARIABLE.fullmatch(name) for name in code.co_names)
    return named and not any(isinstance(constant, CodeType) for constant in code.co_consts)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _trusted:
        return
    if event == "exec":
        code = arguments[0]
        # Modules that are imported late come from files; what was text a moment ago has no file.
        if code.co_filename.startswith("<") and not is_harmless(code):
            _refuse("an answer that is code")
    elif event == "open":
        flags = arguments[2]
        if isinstance(flags, int) and flags & _WRITES:
            _refuse("writing a file")
    elif event in _REFUSED:
        _refuse(event)


def _refuse(what: str) -> None:
    global num_refused
    num_refused += 1
    raise RefusedCode(what)
