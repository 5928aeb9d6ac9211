"""Arguments `key=value` of the command line -> keys and values; dotted keys -> what they reach into."""

import copy
import json
from collections.abc import Iterable
from typing import Any

import yaml

from whetstone.config.yaml_text import check_text, check_values, parse, shorten
from whetstone.errors import UserError

COMMAND_LINE = "command line"
# Free text, which may look like YAML: "Answer briefly: one word", "{question}".
TEXTS = ("developer_prompt", "system_prompt", "prompt_template", "assistant_prefix", "chat_template")


def parse_overrides(words: Iterable[str]) -> dict[str, Any]:
    """`key=value`, `--key=value`, `--key value` and a bare `--switch` (true) -> keys; values are read as
    YAML.
    """
    words = list(words)
    for word in words:
        check_text(word, f"'{shorten(word)}' ({COMMAND_LINE})")
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not key or (not equals and not word.startswith("--")):
            raise UserError(f"'{shorten(word)}' is not understood: write key=value, such as max_steps=100.")
        if not equals:
            follows = bool(words) and not words[0].startswith("--") and "=" not in words[0]
            text = words.pop(0) if follows else "true"
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
        place = flat[head] = _mapping(flat.get(head, before.get(head)), head)
        for name in path[:-1]:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise UserError(f"'{shorten(key)}' reaches into {name}, which is not a mapping.")
        place[path[-1]] = value
    return flat


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise UserError(f"{key} is a text that can't be read as JSON: write a mapping.") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{key} is a {type(value).__name__}, not a mapping, so nothing can be set inside it.")
    return copy.deepcopy(value)
