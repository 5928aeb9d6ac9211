"""The page's modules as one script, and data that can lie inside a page: for a file that opens offline."""

import base64
import functools
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

from whetstone.files import json_safe

IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.M)


def read_static(name: str) -> str:
    return (files("whetstone.watch") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def script(entry: str) -> str:
    """A module with all that it imports; each keeps a scope of its own."""
    parts = [
        f"const module_{name} = (() => {{\n{_body(name)}}})();" for name in _order(entry) if name != entry
    ]
    code = "\n".join([*parts, _without_imports(entry)])
    assert "</script" not in code.lower() and "<!--" not in code
    return code


def _order(entry: str) -> list[str]:
    """Modules, each after those that it imports."""
    order: list[str] = []

    def visit(name: str) -> None:
        for _, other in IMPORT.findall(read_static(f"{name}.js")):
            visit(other)
        if name not in order:
            order.append(name)

    visit(entry)
    return order


def _without_imports(name: str) -> str:
    def as_constants(match: re.Match[str]) -> str:
        return f"const {{{match[1]}}} = module_{match[2]};\n"

    return EXPORT.sub("", IMPORT.sub(as_constants, read_static(f"{name}.js")))


def _body(name: str) -> str:
    exports = EXPORT.findall(read_static(f"{name}.js"))
    return f"{_without_imports(name)}return {{ {', '.join(exports)} }};\n"


def digest(text: str) -> str:
    """What a Content-Security-Policy calls this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def inline_json(value: Any) -> str:
    """JSON without a character that could end its element, or that a browser does not show."""
    text = json.dumps(json_safe(value), separators=(",", ":"))  # ASCII
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
