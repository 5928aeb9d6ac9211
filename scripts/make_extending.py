"""Put the files of examples/extending into docs/extending.md, behind the comments that name them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"(<!-- (examples/\S+) -->\n)(?:\n```\w+\n.*?\n```\n)?", re.DOTALL)


def insert_files(page: str) -> str:
    """The page with the files as they are now."""

    def block(match: re.Match[str]) -> str:
        path = ROOT / match[2]
        language = {"py": "python"}.get(path.suffix[1:], path.suffix[1:])
        return f"{match[1]}\n```{language}\n{path.read_text().rstrip()}\n```\n"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(insert_files(PAGE.read_text()))
