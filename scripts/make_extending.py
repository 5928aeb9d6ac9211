"""Put the files of examples/ into docs/extending.md and docs/agents.md, behind comments that name them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "extending.md"
PAGES = (PAGE, ROOT / "docs" / "agents.md")
BLOCK = re.compile(r"(<!-- (examples/\S+) -->\n)(?:\n```\w+\n.*?\n```\n)?", re.DOTALL)


def insert_files(page: str) -> str:
    """The page with the files as they are now."""

    def block(match: re.Match[str]) -> str:
        path = ROOT / match[2]
        language = {"py": "python"}.get(path.suffix[1:], path.suffix[1:])
        return f"{match[1]}\n```{language}\n{path.read_text().rstrip()}\n```\n"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(insert_files(path.read_text()))
