"""Load a function or class that a configuration names: `my_file.py:name` or `package.module:name`.

Paths are relative to the working directory. It and the file's own folder are the last ones to import from: a
`datasets.py` there replaces no package. A file becomes a submodule of this module, with a hash of its path in
the name: two files `reward.py` are two modules, and any process finds the module of a pickled object.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import StringConstraints

from whetstone.errors import UserError, explained, message_of

# The type of a key that accepts such a name: `Literal[...] | PluginSpec`.
PluginSpec = Annotated[str, StringConstraints(pattern=r"^.+:\w+$", max_length=4_096)]
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_PREFIX = f"{__name__}."
__path__: list[str] = []  # this module may have submodules, which `_PluginFinder` finds


def is_plugin(spec: str) -> bool:
    """Whether `spec` names an object in a file or module, not a built-in."""
    return ":" in spec


def check_object(spec: str, what: str) -> None:
    """Raise if `spec`, the value of the key `what`, cannot exist. Runs no code of the user's."""
    source, name = _split(spec, what)
    if not source.endswith(".py"):
        return  # a module: only an import can tell
    path = Path(source)
    if not path.is_file():
        raise UserError(f"{what} names '{spec}', but there is no file {source} in {Path.cwd()}.")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise UserError(f"{what} names '{spec}', but {source} is not readable as Python: {error}.") from None
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    others = ast.Import | ast.ImportFrom | ast.Assign | ast.If | ast.Try
    may_define_more = any(isinstance(node, others) for node in tree.body)
    if name not in defined and not (may_define_more and re.search(rf"\b{name}\b", text)):
        names = ", ".join(defined) or "none"
        raise UserError(f"{what} names '{spec}', but {source} has no '{name}': it defines {names}.")


def load_object(spec: str, what: str) -> Any:
    """The function or class that `spec`, the value of the key `what`, names. Runs the user's module."""
    source, name = _split(spec, what)
    if source.endswith(".py"):
        check_object(spec, what)
    try:
        module = _import(source)
    except Exception as error:  # code of the user's, which may raise anything
        raise UserError(f"{what} names '{spec}', which fails to import: {describe_error(error)}.") from error
    if not hasattr(module, name):
        raise UserError(f"{what} names '{spec}', but {source} has no '{name}'.")
    loaded = getattr(module, name)
    if not callable(loaded):
        raise UserError(f"{what} names '{spec}', a {type(loaded).__name__}, not a function or class.")
    return loaded


def _split(spec: str, what: str) -> tuple[str, str]:
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise UserError(f"{what} names '{spec}': write my_file.py:my_name, or a built-in name.")
    return source, name


def _import(source: str) -> ModuleType:
    _add_folder(str(Path.cwd()))  # the packages of the user's project
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    _add_folder(str(path.parent))  # modules beside the file
    name, content = _module_name(path), path.read_bytes()
    loaded = sys.modules.get(name)
    if loaded is None or vars(loaded).get("__content__") != content:  # the file is new here, or was edited
        sys.modules.pop(name, None)
        loaded = importlib.import_module(name)
        vars(loaded)["__content__"] = content
    return loaded


def _add_folder(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _module_name(path: Path) -> str:
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return f"{_PREFIX}{path.stem.replace('.', '%2E')}_{digest}"


class _PluginFinder:
    """Finds a user's file by the name of its module, in a process that starts with our `sys.path`, too."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        stem = name.removeprefix(_PREFIX).rpartition("_")[0].replace("%2E", ".")
        paths = (Path(folder, f"{stem}.py").resolve() for folder in sys.path)
        file = next((path for path in paths if _module_name(path) == name), None)
        return None if file is None else importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_PluginFinder)


def describe_error(error: BaseException, function: Any = None) -> str:
    """An error of the user's code in one line, with the line of their file that raised it; else that of the
    `function`, which could not be called.
    """
    text = " ".join(message_of(error).split())[:300].rstrip(".")
    trace, line = error.__traceback__, ""
    if (code := getattr(inspect.unwrap(function), "__code__", None)) is not None:
        line = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if "importlib" not in filename and not filename.startswith(_PACKAGE):
            line = f" ({Path(filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{text}{line}"


def users_code(failed: str) -> contextlib.AbstractContextManager[None]:
    """Inside, whatever code of the user's raises becomes a sentence that begins with `failed`."""
    return explained(lambda error: f"{failed}: {describe_error(error)}.")


def awaited(value: Any) -> Any:
    """What a function of the user's own returned, `async` or not."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # takes time to import, and few functions are async

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
