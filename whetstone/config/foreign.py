"""A configuration of another project -> our keys, each with its origin (`whet import`).

The names are in config/projects, one table for each project. Nothing of a file is executed.
"""

import ast
import json
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import add, floordiv, mod, mul, sub, truediv
from pathlib import Path
from typing import Any

from whetstone.config.data_keys import SETTINGS as DATA_KEYS
from whetstone.config.load import SECTION_OF, build, flatten
from whetstone.config.overrides import parse_overrides
from whetstone.config.sections import Config
from whetstone.config.tables import detect, is_moot, table
from whetstone.config.translate import MAPPINGS, OTHER_NAMES, Translation
from whetstone.config.yaml_text import read_yaml
from whetstone.errors import UserError

_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "load_dataset", "get_peft_model", "from_pretrained")
_POSITIONS = {"GRPOTrainer": ("model",), "load_dataset": ("path", "name"), "from_pretrained": ("model_name",)}
_SIGNS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.FloorDiv: floordiv, ast.Mod: mod}
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$(\w+)")
_MODULE = re.compile(r"([\w.]+)\.(\w+)")
_OPERAND = re.compile(r"\b(?!if\b|else\b)[a-z_][\w.]*")


class Unread(str):
    """An expression of a script: only running it would tell its value."""


class Imported:
    """What became of the keys of a file."""

    def __init__(self, theirs: dict[str, Any], project: str | None = None) -> None:
        self.project = project or detect(theirs)
        self.origins: dict[str, list[str]] = {}  # our key -> their keys, or a formula over them
        self.left: dict[str, list[str]] = defaultdict(list)  # reason -> their keys without a counterpart
        self._translation, self._table = Translation(SECTION_OF), table(self.project)
        self.differs: list[str] = list(self._table["differs"])
        accepted = {key: key for key in (*OTHER_NAMES, *SECTION_OF)} if self._table["trl"] else {}
        self._targets: dict[str, str] = accepted | self._table["names"]
        self._operands = {*_OPERAND.findall(" ".join(map(str, self._table["arithmetic"].values())))}
        self._names = {*self._targets, *self._table["values"], *self._operands} - {*self._table["without"]}
        self._theirs = flat = dict(self._flatten(theirs))
        for key, value in flat.items():  # ${section.key} of OmegaConf
            flat[key] = flat.get(str(value)[2:-1], Unread(value)) if "${" in str(value) else value
        named = self._apply_keys()
        defaults = {key: value for key, value in self._table["defaults"].items() if key not in named}
        self._calculate(named, defaults)
        for key, value in defaults.items():
            self._take(f"default of {self.project}: {key}", self._settings, key, "", value)
        for key, value in self._table["fixed"].items():
            self._take(f"default of {self.project}", lambda k, v: {k: v}, key, value)
        for origin, reasons in self._translation.idle.items():
            self.left[next(iter(reasons))].append(origin)
        try:
            self._translation.finish()
            build(self.settings())
        except UserError as error:
            self.differs.append(f"Not valid as it is: {error}")

    def settings(self) -> dict[str, Any]:
        """Our keys, without those defaults of theirs that are ours or decide nothing."""
        flat, ours = self._translation.flat, flatten(Config())
        added = {key for key, origins in self.origins.items() if origins[-1].startswith("default of")}
        idle = {key for key in added if flat.get(key) == ours[key] or is_moot(key, flat)}
        return {key: flat[key] for key in SECTION_OF if key in flat and key not in idle}

    def _apply_keys(self) -> dict[str, Any]:
        """Take the file's keys. Returns their values under the names of the table."""
        named: dict[str, Any] = {}
        # Switches first: other keys say more.
        for key, value in sorted(self._theirs.items(), key=lambda item: not isinstance(item[1], bool)):
            name, rest = self._find(key, {*self._names, *self._table["without"]})
            has_parts = "*" in self._table["values"].get(name, ()) or self._targets.get(name) in MAPPINGS
            if reason := self._table["without"].get(name):
                self.left[reason].append(key)
            elif rest is None or (rest and not has_parts):
                self.left["no counterpart is known"].append(f"{key}: {value}")
            elif isinstance(value, Unread) or (isinstance(value, str) and name in self._operands):
                named[name] = value  # in place of their default
                self.left["only running the script would tell a number or value"].append(f"{key}: {value}")
            elif value is not None:
                named[name] = value
                if not self._take(key, self._settings, name, rest, value) and name not in self._operands:
                    self.left["it changes nothing here"].append(f"{key}: {value}")
        return named

    def _find(self, key: str, known: set[str]) -> tuple[str, str | None]:
        """The known name of a key, with or without its first sections, and what follows it; None: no name."""
        parts = key.split(".", 20)
        for first in range(len(parts)):
            for last in range(len(parts), first, -1):
                for name in (".".join(parts[first:last]), "_".join(parts[first:last])):
                    if name in known:
                        return name, ".".join(parts[last:])
        return key, None

    def _flatten(self, values: dict[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, dict) and value and self._find(f"{head}{key}", self._names)[1] != "":
                yield from self._flatten(value, f"{head}{key}.")
            else:
                yield f"{head}{key}", value

    def _settings(self, name: str, rest: str, value: Any) -> dict[str, Any]:
        """Our keys, or names that `translate.py` knows, for one of theirs."""
        choices = self._table["values"].get(name, {})
        if isinstance(value, str | int | float) and value in choices:
            return choices[value]
        chosen = choices.get("*", {}) if value or value == {} else {}
        target = self._targets.get(name)
        if target is None:
            if choices and "*" not in choices and name not in self._operands:
                raise ValueError(f"{value}: only {', '.join(map(str, choices))} have a counterpart")
            return chosen
        if target == "datasets" and not isinstance(value, dict):
            value = self._datasets(value if isinstance(value, list) else [value])
        elif target == "reward_funcs" and isinstance(value, list):  # package.module.function
            matches = [(entry, _MODULE.fullmatch(str(entry))) for entry in value]
            value = [f"{m[1].replace('.', '/')}.py:{m[2]}" if m else entry for entry, m in matches]
        return chosen | {f"{target}.{rest}" if rest else target: value}

    def _datasets(self, entries: list[Any]) -> dict[str, Any]:
        """Tasks for verl's files, or for the entries of axolotl and prime-rl."""
        tasks, renamed = {}, self._table.get("entries", {})
        files = self._theirs.get("data.val_files")
        files = files if isinstance(files, list) else [files] * len(entries)
        for file in files[len(entries) :]:
            self.left["each of train_files has one file for evaluation"].append(f"data.val_files: {file}")
        for number, entry in enumerate(entries, 1):
            if isinstance(entry, str):
                paths = {"path": entry, "eval_path": "".join(filter(None, files[number - 1 : number]))}
                config = {key: str(Path(path).expanduser()) for key, path in paths.items() if path}
            else:
                merged = entry | entry.get("args", {}) | entry.get("taskset", {})
                config = {renamed[key]: value for key, value in merged.items() if key in renamed}
                for key in [key for key in entry if key not in renamed]:
                    self.left["code of a package: name columns, or a task of ours"].append(
                        f"{key}: {entry[key]}"
                    )
            if config:
                tasks["rows" if len(entries) == 1 else f"rows/{number}"] = {"config": config}
        if not tasks:
            raise ValueError("no rows are named: set datasets (`whet tasks` lists tasks)")
        return tasks

    def _calculate(self, named: dict[str, Any], defaults: dict[str, Any]) -> None:
        values = defaults | named
        for key, formulas in self._table["arithmetic"].items():
            for formula in formulas if isinstance(formulas, list) else [formulas]:
                operands = set(_OPERAND.findall(formula))
                numbers = [values.get(name) for name in operands]
                if not all(isinstance(n, list) or (isinstance(n, int | float) and n >= 0) for n in numbers):
                    continue
                how = _OPERAND.sub(lambda match: f"{match[0]} {values[match[0]]}", formula)
                how = how if operands & {*named} else f"default of {self.project}: {how}"
                tree = ast.parse(formula, mode="eval").body
                is_taken = self._take(
                    how, lambda k, t: {k: v} if (v := _evaluate(t, values)) else {}, key, tree
                )
                if not is_taken and operands & {*named}:
                    self.left["it changes nothing here"].append(how)
                break

    def _take(self, origin: str, convert: Callable[..., dict[str, Any]], *arguments: Any) -> bool:
        """Take what `convert` makes of `arguments`, the last of which is their value; False: nothing."""
        flat, before, theirs = self._translation.flat, dict(self._translation.flat), arguments[-1]
        try:
            settings = convert(*arguments)
            if origin.startswith("default of"):
                settings = {key: value for key, value in settings.items() if key not in flat}
            self._translation.add(origin, settings)
        except (UserError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            self.left[str(error).rstrip(".")].append(origin)
            return True
        changed = {"datasets"} if settings.keys() & DATA_KEYS.keys() else set()
        for key in changed | {key for key in flat if key in settings or flat[key] != before.get(key)}:
            is_shown = isinstance(theirs, str | int | float) and key != "datasets" and theirs != flat[key]
            self.origins.setdefault(key, []).append(f"{origin}: {theirs}" if is_shown else origin)
            changed.add(key)
        while self._translation.complaints.refused:
            self.left[self._translation.complaints.refused.pop()[2]].append(origin)
            return True
        return bool(changed) or origin in self._translation.idle


def import_file(path: Path, project: str | None = None) -> Imported:
    """The configuration of a file; which project's it is, its keys say."""
    imported = Imported(_read(path), project)
    if all(origin.startswith("default of") for origins in imported.origins.values() for origin in origins):
        raise UserError(f"{path} has no key of {imported.project}: name its project with --from.")
    return imported


def _read(path: Path) -> dict[str, Any]:
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return read_yaml(path)
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            return _calls(["".join(cell["source"]) for cell in cells])
        return _calls([text]) if suffix == ".py" else _command_lines(text)
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} can't be read ({error}): give a file that can.") from None


def _calls(cells: list[str]) -> dict[str, Any]:
    """Arguments of the calls that configure a run: {"GRPOConfig.beta": 0.1}."""
    collected: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for cell in cells:
        if not any(call in cell for call in _CALLS) and re.search(r"(?m)^\s*[%!]", cell):
            continue  # commands of the shell
        tree = ast.parse(re.sub(r"(?m)^([ \t]*)[%!].*", r"\1pass", cell))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AugAssign | ast.Call)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if not isinstance(node, ast.Call):
                is_new = isinstance(node, ast.Assign)
                value = _value(node.value, names) if is_new else Unread(ast.unparse(node))
                for target in map(ast.unparse, node.targets if is_new else [node.target]):
                    names[target] = value
                    if re.search(r"(GRPO|Lora)Config\(", str(names.get(target.rpartition(".")[0]))):
                        collected[f"{target} (line {node.lineno})"] = value
                continue
            owner, _, call = ast.unparse(node.func).rpartition(".")
            if call not in _CALLS or (call == "from_pretrained" and not owner.startswith("Fast")):
                continue
            unnamed = (ast.unparse(argument) for argument in node.args[len(_POSITIONS.get(call, ())) :])
            arguments = dict(zip((*_POSITIONS.get(call, ()), *unnamed), node.args, strict=False))
            arguments |= {word.arg or f"**{ast.unparse(word.value)}": word.value for word in node.keywords}
            for key, argument in arguments.items():
                value = Unread(key) if key.startswith("**") else _value(argument, names)
                if collected.setdefault(f"{call}.{key}", value) != value:
                    collected[f"{call}, {key} (line {node.lineno})"] = value
    return collected


def _value(node: ast.AST | str, names: dict[str, Any]) -> Any:
    try:
        tree = ast.parse(node.strip().replace("/", "//"), mode="eval").body if isinstance(node, str) else node
        return _evaluate(tree, names)
    except (SyntaxError, LookupError, ValueError, TypeError, ArithmeticError):
        return Unread(f"$(({node}))" if isinstance(node, str) else ast.unparse(node))


def _evaluate(node: ast.AST, names: dict[str, Any]) -> Any:
    """What constants, names, lists and arithmetic are; an error of Python's for anything else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute() if not isinstance(names[ast.unparse(node)], Unread):
            return names[ast.unparse(node)]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_evaluate(entry, names) for entry in entries]
        case ast.Subscript(value=value, slice=index):
            return _evaluate(value, names)[_evaluate(index, names)]
        case ast.Dict(keys=keys, values=entries):
            pairs = zip((key or ast.Pass() for key in keys), entries, strict=True)  # no key: **others
            return {_evaluate(key, names): _evaluate(entry, names) for key, entry in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names)
        case ast.IfExp(test=test, body=body, orelse=other):
            return _evaluate(body if _evaluate(test, names) else other, names)
        case ast.BinOp(left=left, op=op, right=right):
            numbers = _evaluate(left, names), _evaluate(right, names)
            if all(isinstance(number, int | float) for number in numbers):
                value = _SIGNS[type(op)](*numbers)
                is_whole = all(isinstance(number, int) for number in numbers) and value == int(value)
                return int(value) if is_whole else value
        case ast.Call(func=ast.Name("SamplingParams" | "dict"), args=[], keywords=keywords):
            return {str(keyword.arg): _value(keyword.value, names) for keyword in keywords}
    raise ValueError("not a value that is written out")


def _command_lines(text: str) -> dict[str, Any]:
    """`--key value` and `a.b=value` of a shell script, with its own variables filled in."""
    variables = {"HOME": str(Path.home()), "PWD": "."}
    options: dict[str, list[str]] = {}
    text = re.sub(r"(?m)(?:^|[ \t])#.*", "", text).replace("\\\n", " ")
    text = re.sub(r"(?m)^\s*\w+\+?=\((.*?)\)?\s*$", r"\1", text)  # an array of words
    line = ""
    for part in text.splitlines():
        line += f"{part}\n"
        try:
            parts = shlex.split(_fill_in(line, variables))
        except ValueError:  # of a quotation over several lines
            if len(line) > 10_000:
                raise
            continue
        line = ""
        if parts and all(re.match(r"\w+=|(export|local)$", part) for part in parts):
            variables |= dict(part.split("=", 1) for part in parts if "=" in part)
            continue
        key = ""
        for part in parts:
            name, equals, value = part.lstrip("+~-").partition("=")
            if re.match(r"\d?[<>|&;]|\$[@*]|--$", part):
                key = ""
            elif part.startswith("--") or (equals and re.fullmatch(r"[\w/@]+(\.[\w/@]+)+", name)):
                key = name.replace("-", "_")
                options[key] = [value] if equals else []
                key = "" if equals else key
            elif key:
                options[key].append(part)
    if line:
        raise ValueError("a quotation has no end")
    return {key: _parsed(parts, key) for key, parts in options.items()}


def _fill_in(line: str, variables: dict[str, str]) -> str:
    for _ in range(3):  # a default may name another variable
        line = _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[0] if m[2] is None else m[2]), line)
        if len(line) > 100_000:
            raise ValueError("its variables make too long a line")
    numbers = {name: int(value) for name, value in variables.items() if value.isdecimal()}
    parts = re.split(r"\$\(\((.*?)\)\)", line)  # text, a formula, text, ...
    parts[1::2] = [str(_value(part, numbers)) for part in parts[1::2]]
    return "".join(parts)


def _parsed(parts: list[str], key: str) -> Any:
    if any("$" in part for part in parts):
        return Unread(" ".join(parts))
    values = [parse_overrides([f"{key}={part}"])[key] for part in parts] or [True]
    return values[0] if len(values) == 1 else values
