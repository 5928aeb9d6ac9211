"""Every place that docs/architecture.md names exists: `path:symbol`, paths and packages."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def symbols(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a module, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
    return names


def test_named_places_exist() -> None:
    places = re.findall(r"`(whetstone/[\w/]+\.py):([\w.]+)`", TEXT)
    assert len(places) >= 10
    for path, symbol in places:
        assert symbol in symbols(ROOT / path), f"{path} has no {symbol}"


def test_every_package_is_in_the_table() -> None:
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", TEXT, flags=re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    packages = {path.parent.name for path in (ROOT / "whetstone").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "whetstone").glob("*.py")} - {"__init__"}
    assert named == packages | modules
