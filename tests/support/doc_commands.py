"""The commands of docs/data.md."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


COMMANDS = [
    line
    for kind, _, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if line.startswith("whet ")
]
