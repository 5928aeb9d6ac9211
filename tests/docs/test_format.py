"""Lines of the documentation fit a terminal."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LIMIT = 120
ITEM = re.compile(r"(?:[-+*]|\d+\.) ")
UNBREAKABLE = re.compile(r"\||!\[| {4}|<!--")  # tables, pictures, indented code


def prose(text: str) -> Iterator[str]:
    """Lines outside of code and of what a script writes."""
    is_code = is_generated = False
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif re.match(r"<!-- \w", line):
            is_generated = line != "<!-- end -->" and "<!-- end -->" in lines[number:]
        elif not is_code and not is_generated and not UNBREAKABLE.match(line):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_above_120_characters(page: Path) -> None:
    assert [line for line in prose(page.read_text(encoding="utf-8")) if len(line) > LIMIT] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_becomes_an_item_of_a_list(page: Path) -> None:
    """As the second line of "at temperature / 1. All runs ..." would."""
    lines = list(prose(page.read_text(encoding="utf-8")))
    items = [
        line
        for before, line in pairwise(lines)
        if ITEM.match(line) and before and not ITEM.match(before) and not before.startswith((" ", "#"))
    ]
    assert items == []
