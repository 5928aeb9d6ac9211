"""A Python function as `file.py:function`, which scoring processes can import.

A function of a notebook or script is written into a file of its own, with the modules, functions and
constants that it uses: a script must not be imported again, for it would start its own training.
"""

import ast
import builtins
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from whetstone.errors import UserError
from whetstone.files import atomic_write


def spec_of(function: Callable[..., Any], folder: Path) -> str:
    """`file.py:name`; a file that has to be written goes into `folder`, named by its content."""
    name = getattr(function, "__name__", repr(function))
    if not isinstance(function, FunctionType) or "<" in function.__qualname__ or function.__closure__:
        raise UserError(
            f"{name} is no plain function at the top level: write it with `def`, or give 'my_file.py:name'."
        )
    if function.__module__ != "__main__":
        file = str(inspect.getsourcefile(function))
        return f"{function.__module__ if '-packages' in file else file}:{name}"  # it may import its package
    lines: dict[str, str] = {"": "from __future__ import annotations"}
    _add_source(function, lines)
    text = "\n\n".join(lines.values()) + "\n"
    path = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    atomic_write(path, text, many_writers=True)
    return f"{path}:{name}"


def _add_source(function: FunctionType, lines: dict[str, str]) -> None:
    """Add the source of `function`, after that of the global names that it uses."""
    lines[function.__name__] = ""
    source = _source(function)
    own = {*dir(builtins), *function.__code__.co_varnames}
    for name in _names(source):
        if name in lines or name in own or name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            lines[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, FunctionType) and value.__module__ == "__main__":
            _add_source(value, lines)
        elif isinstance(value, FunctionType | type) and value.__module__ != "__main__":
            lines[name] = f"from {value.__module__} import {value.__name__} as {name}"
        elif isinstance(value, str | bytes | int | float | bool | None | tuple | list | dict | set):
            lines[name] = f"{name} = {value!r}"
        else:
            raise UserError(
                f"{function.__name__} uses {name}, a {type(value).__name__}, which scoring "
                "processes cannot get: create it inside the function, or give 'my_file.py:name'."
            )
    del lines[function.__name__]  # it comes after what it uses
    lines[function.__name__] = source


def _names(source: str) -> list[str]:
    """The names that a function uses in its body, its defaults and its decorators."""
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    defaults = [entry for entry in (*node.args.defaults, *node.args.kw_defaults) if entry is not None]
    trees = [*node.decorator_list, *defaults, *node.body]
    return [name.id for tree in trees for name in ast.walk(tree) if isinstance(name, ast.Name)]


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UserError(
            f"the source of {function.__name__} is not known: put it into a file and give 'my_file.py:name'."
        ) from None
