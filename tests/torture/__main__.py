"""`python -m tests.torture`: the campaign's command line."""

import os

os.environ["OMP_NUM_THREADS"] = (
    "1"  # read when torch is imported: runs share the cores, and sums keep one order
)
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import sys
from pathlib import Path

from tests.torture import forks, table
from tests.torture.campaign import Campaign, run_one
from tests.torture.parts import PARTS

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """0: nothing was lost; 1: something was."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, help="start no trial after so long (default: run all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N trials of each part")
    parser.add_argument("--match", default="", metavar="TEXT", help="only trials with TEXT in their name")
    parser.add_argument("--resume", action="store_true", help="go on with the campaign in --folder")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, os.cpu_count() or 1)))
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "torture")
    parser.add_argument(
        "--docs", type=Path, help="write the table there as well, if the campaign is complete"
    )
    parser.add_argument("--trial", help="run one trial, such as kills/lora/3, and keep its folder")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}: choose from {', '.join(PARTS)}")
    print("Importing what runs need ...", flush=True)
    forks.import_everything()
    if arguments.trial:
        part, _, name = arguments.trial.partition("/")
        if part not in PARTS or name not in PARTS[part].names(arguments.seed):
            parser.error(f"there is no trial {arguments.trial}")
        outcome = run_one(PARTS[part], name, arguments.seed, arguments.folder)
        print("\n".join(outcome.losses) or f"survived ({outcome.skipped or outcome.details})")
        return int(bool(outcome.losses))
    parts = [PARTS[name] for name in chosen]
    campaign = Campaign(
        arguments.folder,
        parts,
        arguments.seed,
        jobs=arguments.jobs,
        resume=arguments.resume,
        first=arguments.first,
        match=arguments.match,
    )
    try:
        campaign.run(arguments.minutes)
    except KeyboardInterrupt:
        print("Stopped: go on with --resume.", file=sys.stderr)
    whole = len(campaign.records) >= len(campaign.plan) and not (
        arguments.only or arguments.first or arguments.match
    )
    docs = arguments.docs if whole else None
    command = "make torture" if arguments.docs else " ".join(["python -m tests.torture", *sys.argv[1:]])
    summary = table.write(campaign, command, docs)
    print((campaign.folder / "table.md").read_text(encoding="utf-8"))
    return int(bool(summary["losses"]))


if __name__ == "__main__":
    sys.exit(main())
