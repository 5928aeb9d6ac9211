"""The commands of docs/data.md and of the exercises of docs/course.md, which tests of their own run."""

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

COURSE = (DOCS / "course.md").read_text(encoding="utf-8")
EXERCISE_COMMANDS = [line.strip() for line in COURSE.splitlines() if line.startswith("    whet ")]
