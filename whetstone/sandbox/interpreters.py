"""Runs Python, Klong and SQL programs inside the forked process, without starting an interpreter.

The process ends with the program. Values of calls are printed behind `VALUE_MARKER` as JSON of exact plain
types: an object of the program's own class is never compared or printed by its own methods.
"""

import atexit
import builtins
import json
import os
import sys
import traceback
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from whetstone.sandbox.program import VALUE_MARKER

CompileCallback = Callable[[bool], None]
_DICTIONARIES = (dict, Counter, OrderedDict, defaultdict)  # equal to a dict of the same entries


class NotPlain(Exception):
    """A value that cannot be compared from outside."""


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON knows it; raises `NotPlain`. Tuples are lists, sets are sorted lists."""
    kind = type(value)
    if depth > 50:
        raise NotPlain("a value nested too deeply")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [plain(entry, depth + 1) for entry in value]
    if kind in (set, frozenset):
        return sorted((plain(entry, depth + 1) for entry in value), key=json.dumps)
    if kind in _DICTIONARIES:
        return {_key(key): plain(entry, depth + 1) for key, entry in value.items()}
    if kind.__module__ == "numpy":
        return plain(value.tolist(), depth + 1)
    raise NotPlain(f"a value of type {kind.__name__}")


def _key(key: Any) -> str:
    if type(key) in (str, int, float, bool) or key is None:
        return key if type(key) is str else json.dumps(key)
    raise NotPlain(f"a dictionary key of type {type(key).__name__}")


def literal(value: Any, depth: int = 0) -> str:
    """`value` as Python writes it, tuples and sets as what they are; raises `NotPlain`."""
    kind = type(value)
    if depth > 50:
        raise NotPlain("a value nested too deeply")
    inner = [literal(entry, depth + 1) for entry in value] if kind in (list, tuple, set, frozenset) else []
    if value is None or kind in (bool, int, str, bytes, float, complex):
        return repr(value)
    if kind is list:
        return f"[{', '.join(inner)}]"
    if kind is tuple:
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if kind in (set, frozenset):
        return f"{{{', '.join(inner)}}}" if inner else "set()"
    if kind in _DICTIONARIES:
        pairs = (f"{literal(key, depth + 1)}: {literal(entry, depth + 1)}" for key, entry in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise NotPlain(f"a value of type {kind.__name__}")


def run(runner: str, source: str, call: tuple[str, list[Any]] | None, after_compile: CompileCallback) -> None:
    """Run and end this process. `after_compile` hears, before any of the program's code runs, whether it
    could not be compiled. The interpreter's own streams are made for 0, 1 and 2, whatever those are by now.
    """
    for name in _own_modules:
        del sys.modules[name]
    code = 1
    try:
        code = _RUNNERS[runner](source, call, after_compile)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:  # whatever a program raises, its traceback is the answer
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        except BaseException:  # a program may have replaced or closed it
            code = code or 1
        os._exit(code & 0xFF)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if type(error.code) is int:
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _python(source: str, call: tuple[str, list[Any]] | None, after_compile: CompileCallback) -> int:
    try:
        code = compile(source, "main.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        after_compile(True)
        traceback.print_exc(limit=0)
        return 1
    after_compile(False)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"], sys.argv = main, ["main.py"]
    write, dumps = os.write, json.dumps  # kept from a program that changes them by accident
    exec(code, main.__dict__)
    if call is not None:
        function, arguments = call
        if function.startswith("="):  # an expression, whose value is wanted as Python writes it
            value = eval(function[1:], main.__dict__)
            text = dumps(literal(value))
        else:
            value = eval(function, main.__dict__)(*arguments)
            text = dumps(plain(value))
        sys.stdout.flush()
        data = memoryview(f"{VALUE_MARKER}{text}\n".encode())
        while data:
            data = data[write(1, data) :]
    if "threading" in sys.modules:  # not imported here: its hook at every fork would cost more than it gives
        sys.modules["threading"]._shutdown()  # waits for the program's threads
    atexit._run_exitfuncs()
    return 0


# What programs import most often; `random` seeds itself anew after every fork.
_PRELOADED = {
    "python": "bisect collections functools heapq itertools math re string typing",
    "sql": "sqlite3",
}
_klong: Any = None
_own_modules: dict[str, types.ModuleType] = {}  # modules that a program may not see


def preload(runner: str) -> None:
    """Import, once and before any fork, what programs of this kind need."""
    global _klong
    # Held here, so that forgetting them after the fork does not take them apart, page by page.
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "whetstone":
            _own_modules[name] = module
    if runner == "klong":
        from klongpy import KlongInterpreter

        _klong = KlongInterpreter()
        _klong("{x+y}(1;2)")
    for name in _PRELOADED.get(runner, "").split():
        __import__(name)


def _run_klong(source: str, call: tuple[str, list[Any]] | None, after_compile: CompileCallback) -> int:
    after_compile(False)
    _klong(source)
    if call is None:
        return 0
    function, arguments = call
    names = [f"whetArgument{'abcdefgh'[number]}" for number in range(len(arguments))]
    for name, argument in zip(names, arguments, strict=True):
        _klong[name] = to_klong(argument)
    value = _klong(f"{function}({';'.join(names)})")
    sys.stdout.flush()
    os.write(1, f"{VALUE_MARKER}{json.dumps(plain(from_klong(value)))}\n".encode())
    return 0


def to_klong(value: Any) -> Any:
    """Plain data as the interpreter holds it: truth is 1 or 0, lists are arrays, text is text."""
    import numpy

    if type(value) is bool:
        return int(value)
    if type(value) is list:
        items = [to_klong(entry) for entry in value]
        if items and all(type(entry) in (int, float) for entry in items):
            return numpy.asarray(items)
        shapes = {entry.shape if isinstance(entry, numpy.ndarray) else None for entry in items}
        if len(shapes) == 1 and None not in shapes and items[0].dtype != object:
            return numpy.stack(items)  # a matrix
        array = numpy.empty(len(items), dtype=object)
        array[:] = items
        return array
    return value


def from_klong(value: Any) -> Any:
    """A value of the interpreter as plain data: characters are text, arrays are lists."""
    import numpy

    name = type(value).__name__
    if isinstance(value, numpy.ndarray):
        return [from_klong(entry) for entry in value.tolist()]
    if isinstance(value, numpy.generic):
        return value.item()
    if name in ("KGChar", "KGSym") and isinstance(value, str):
        return str.__str__(value)
    if type(value) is list:
        return [from_klong(entry) for entry in value]
    if type(value) is dict:
        return {from_klong(key): from_klong(entry) for key, entry in value.items()}
    return value


def _sql(source: str, call: tuple[str, list[Any]] | None, after_compile: CompileCallback) -> int:
    """stdin holds the tables, as SQL; prints the rows of the last query, columns joined by |."""
    import sqlite3

    after_compile(False)
    database = sqlite3.connect(":memory:")
    database.executescript(sys.stdin.read())
    *before, last = _statements(source, sqlite3.complete_statement) or [""]
    for statement in before:
        database.execute(statement)
    for row in database.execute(last):
        print("|".join("" if cell is None else str(cell) for cell in row))
    return 0


def _statements(source: str, is_complete: Callable[[str], bool]) -> list[str]:
    statements, pending = [], ""
    for piece in source.split(";"):
        pending += piece + ";"
        if is_complete(pending):
            if pending.strip(" \n\t;"):
                statements.append(pending)
            pending = ""
    if pending.strip(" \n\t;"):
        statements.append(pending)
    return statements


_RUNNERS: dict[str, Callable[[str, tuple[str, list[Any]] | None, CompileCallback], int]] = {
    "python": _python,
    "klong": _run_klong,
    "sql": _sql,
}
