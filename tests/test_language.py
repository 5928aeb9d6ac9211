"""The language of the package: identifiers are nouns and verbs of the field, in American spelling.

Reads the syntax trees; imports nothing of the package. CONTRIBUTING.md has the rules.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "whetstone"
# Participles and catch-all words that named three to six different things each.
VAGUE = {
    "made",
    "told",
    "begun",
    "given",
    "asked",
    "taken",
    "kept",
    "found",
    "meant",
    "one",
    "ones",
    "words",
    "place",
    "places",
    "whoever",
    "whatever",
    "thing",
    "things",
    "stuff",
}
PREPOSITIONS = {"of", "at", "through", "by", "into", "onto", "upon"}
BRITISH = re.compile(
    r"optimis|normalis|utilis|initialis|serialis|synchronis|maximis|minimis|tokenis|quantis|recognis|colour|"
    r"behaviour|favour|neighbour|licence|metre"
)
# Paraphrases that nobody searches for.
PHRASES = re.compile(r"\bgoes on\b|can't be had|\bto be had\b|\baffair\b|\bbusiness\b|\bwhoever\b")


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """(name, line, kind) of everything that the code defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, "function"
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, "class"
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, "variable"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, "variable"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, "variable"


def is_against_the_rules(name: str, kind: str) -> bool:
    bare = name.strip("_").lower()
    is_preposition = kind == "function" and bare in PREPOSITIONS
    return bare in VAGUE or is_preposition or BRITISH.search(bare) is not None


def test_identifiers_are_terms_of_the_field() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line, kind in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if is_against_the_rules(name, kind)
    ]
    assert wrong == []


DECLARED = re.compile(r"\b(?:const|let|function|class)\s+(\w+)|\(?(\w+)\)? =>|[(,]\s*(\w+)(?=[^()]*\) =>)")


def test_identifiers_of_the_page_are_terms_of_the_field() -> None:
    wrong = [
        f"{path.name}:{number} {name}"
        for path in sorted(PACKAGE.rglob("*.js"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in DECLARED.finditer(line)
        if is_against_the_rules(name := next(filter(None, match.groups())), "variable")
    ]
    assert wrong == []


def test_no_file_is_above_400_lines() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [str(path.relative_to(PACKAGE)) for path, size in sizes.items() if size > 400] == []


def test_no_paraphrases_of_terms() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{number} {match[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := PHRASES.search(line))
    ]
    assert wrong == []


# Their names are older than the rule.
OLD_NAMES = ("distributed/", "trl/", "vllm/", "tasks/test_scoring.py")


def test_names_of_tests_have_at_most_60_characters() -> None:
    names = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("test_*.py")
        if not str(path.relative_to(TESTS)).startswith(OLD_NAMES)
        for name, _, kind in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if kind == "function" and name.startswith("test_") and len(name) > 60
    }
    assert names == set()
