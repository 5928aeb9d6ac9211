"""Arguments `key=value` of the command line -> keys and values; dotted keys -> what they reach into."""

import copy
import json
from collections.abc import Iterable
from typing import Any

import yaml

from whetstone.config.yaml_text import check_text, check_values, parse, shorten
from whetstone.errors import UserError

COMMAND_LINE, ARGUMENT = "command line", "argument"
# Free text, which may look like YAML: "Answer briefly: one word", "{question}".
TEXTS = ("developer_prompt", "system_prompt", "prompt_template", "assistant_prefix", "chat_template")


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """`key=value`, `--key=value`, `--key value` and a bare `--switch` (true); values are read as YAML."""
    rest = list(arguments)
    for argument in rest:
        check_text(argument, f"'{shorten(argument)}' ({COMMAND_LINE})")
    values: dict[str, Any] = {}
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not key or (not equals and not argument.startswith("--")):
            raise UserError(f"'{shorten(argument)}' is not understood: write key=value (max_steps=100).")
        if not equals:
            follows = bool(rest) and not rest[0].startswith("--") and "=" not in rest[0]
            text = rest.pop(0) if follows else "true"
        key = key.replace("-", "_")
        try:
            values[key] = parse(text, f"{shorten(key)} ({COMMAND_LINE})") if text else None
        except UserError:
            raise
        except (yaml.YAMLError, ValueError):
            values[key] = text
        if key in TEXTS and isinstance(values[key], dict | list):
            values[key] = text
    check_values(values, COMMAND_LINE)
    return values


def expand_dotted(values: dict[str, Any], before: dict[str, Any], mappings: Iterable[str]) -> dict[str, Any]:
    """`datasets.math.config.path: x` put into the mapping `datasets` as it stood, for keys in `mappings`."""
    known = set(mappings)
    flat = {key: value for key, value in values.items() if key.split(".")[0] not in known or "." not in key}
    for key, value in values.items():
        if key in flat:
            continue
        head, *path = key.split(".")
        if "" in path:
            raise UserError(f"'{shorten(key)}' has an empty part: write {head}.name.setting=value.")
        inner = flat[head] = copy.deepcopy(flat.get(head, before.get(head)) or {})
        for name in path[:-1]:
            if not isinstance(inner, dict):
                break
            if inner.get(name) is None:
                inner[name] = {}
            inner = inner[name]
        if not isinstance(inner, dict):
            raise UserError(f"'{shorten(key)}' reaches into something that is not a mapping.")
        inner[path[-1]] = value
    return flat


def parse_json(key: str, value: Any) -> Any:
    """A mapping that was written as JSON text; anything else as it is."""
    if not isinstance(value, str) or not (value.lstrip().startswith("{") or not value.strip()):
        return value
    try:
        return json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        raise UserError(f"{key} is a text that can't be read as JSON: write a mapping.") from None
