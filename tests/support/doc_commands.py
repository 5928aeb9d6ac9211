"""Commands of the docs that tests of their own run: docs/data.md, own data in README.md, docs/course.md."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "data.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


COMMANDS = [
    line
    for kind, _, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if line.startswith("whet ")
]

README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
OWN_DATA_COMMANDS = [
    line.partition("  ")[0] for line in README.splitlines() if re.match(r"whet \w+ my_rows\b", line)
]

COURSE = (DOCS / "course.md").read_text(encoding="utf-8")
EXERCISE_COMMANDS = [line.strip() for line in COURSE.splitlines() if line.startswith("    whet ")]
