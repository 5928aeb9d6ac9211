#!/usr/bin/env python3
"""Write the rows of the recipes `expressions` and `sums` to a file, to look at or to change.

    python scripts/make_expressions.py expressions.jsonl
    python scripts/make_expressions.py sums.jsonl --sums
    whet train sums data_path=sums.jsonl

The recipes need no file: `path: expressions` and `path: sums` make the same rows (tasks/examples.py).
"""

import argparse
import json
from pathlib import Path

from whetstone.tasks.examples import NUM_EXPRESSIONS, make_expressions, make_sums


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=NUM_EXPRESSIONS)
    parser.add_argument("--sums", action="store_true", help="sums of reasoning-gym, for pebble; no --count")
    arguments = parser.parse_args()
    rows = make_sums() if arguments.sums else make_expressions(arguments.count)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} problems are in {arguments.out}.")


if __name__ == "__main__":
    main()
