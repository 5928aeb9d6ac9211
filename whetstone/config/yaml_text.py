"""YAML text -> plain data, within limits: of size, aliases, nesting, repeated keys, numbers, characters."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from whetstone.errors import UserError

MAX_BYTES = 200_000  # of a file: some seconds of parsing
MAX_NODES = 100_000  # after aliases are followed
MAX_DEPTH = 40
MAX_SHOWN = 60  # characters of a user's text in a message
MAX_INT = 2**63 - 1
_BRACKETS = re.compile(r"(?:[\[{]\s*){41}")  # more than MAX_DEPTH in a row, which take the parser seconds


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-6 as a number, as everybody expects (YAML 1.1 wants 1.0e-6), and a date as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)?\.?\d[\d_]*[eE][-+]?\d+$"),
    list("-+0123456789."),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}: give a shorter file.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: give a YAML file.") from None
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): give a YAML file that can.") from None
    try:
        data = parse(text, str(path))
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f" near line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not readable as YAML{where}: check its indentation and quotes.") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} holds a value that can't be read: {error}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}: write lines such as 'max_steps: 100'.")
    values = {str(key): value for key, value in data.items()}
    check_values(values, path.name)
    return values


def parse(text: str, where: str) -> Any:
    """The data of a YAML text; `yaml.YAMLError` or `ValueError` if it is none, `UserError` beyond limits."""
    if _BRACKETS.search(text):
        raise UserError(f"{where} is nested too deeply: at most {MAX_DEPTH} levels.")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_size(node, where)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: at most {MAX_DEPTH} levels.") from None


def _check_size(root: yaml.Node, where: str) -> None:
    """Reject unbounded aliases, endless nesting, keys with two values. An alias is measured once."""
    measured: dict[int, tuple[int, int]] = {}  # node -> (nodes beneath it, levels beneath it)
    open_nodes: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        if id(node) in measured:
            return measured[id(node)]
        if id(node) in open_nodes:
            raise UserError(f"{where} has an alias that contains itself: write the value out.")
        open_nodes.add(id(node))
        size, depth = 1, 0
        for child in _children(node, where):
            child_size, child_depth = measure(child)
            size, depth = size + child_size, max(depth, child_depth + 1)
        open_nodes.discard(id(node))
        if size > MAX_NODES:
            raise UserError(f"{where} expands to more than {MAX_NODES:,} values by aliases: write fewer.")
        if depth > MAX_DEPTH:
            raise UserError(f"{where} is nested too deeply: at most {MAX_DEPTH} levels.")
        measured[id(node)] = size, depth
        return size, depth

    measure(root)


def _children(node: yaml.Node, where: str) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if not isinstance(node, yaml.MappingNode):
        return []
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            continue
        before = seen.setdefault(key.value, value)
        are_scalars = isinstance(before, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)
        if before is not value and not (are_scalars and before.value == value.value):
            raise UserError(
                f"{where} gives {shorten(key.value)!r} twice, with different values (line "
                f"{key.start_mark.line + 1}): leave one out."
            )
    return [part for pair in node.value for part in pair]


def check_values(values: dict[str, Any], origin: str) -> None:
    """Reject numbers that are not finite or too large, and characters that no file or path can hold."""

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                check_text(str(key), f"A key ({origin})")
                visit(entry, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list | tuple | set):
            for entry in value:
                visit(entry, path)
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{shorten(path)} ({origin}) is {value}: give a finite number.")
        elif isinstance(value, int) and abs(value) > MAX_INT:
            raise UserError(f"{shorten(path)} ({origin}) is too large a number: at most {MAX_INT:,}.")
        elif isinstance(value, str):
            check_text(value, f"{shorten(path)} ({origin})")

    visit(values, "")


def check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise UserError(f"{what} holds a null character: leave it out.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{what} is not valid UTF-8: write it in UTF-8.")


def shorten(text: str) -> str:
    """A user's text as a message can show it: one line, not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
