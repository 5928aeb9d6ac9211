"""`whet push`: upload the model of a run to the hub."""

import argparse

from whetstone.commands.parser import CommandParser
from whetstone.terminal.text import counted, size

DESCRIPTION = """
Upload the final model of a run, a checkpoint or an exported folder to the hub. The repository is private
unless --public is given. An adapter is pushed as an adapter; `whet export` merges it first.
"""
EXAMPLES = """
whet push outputs/quickstart my-name/quickstart --dry-run
whet push outputs/quickstart my-name/quickstart
whet push outputs/quickstart/export my-name/quickstart-merged --public
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("source", metavar="RUN", help="the folder of a run, a checkpoint or a model")
    parser.add_argument("name", metavar="NAME", help="OWNER/NAME on the hub, or NAME for one of your own")
    parser.add_argument("--dry-run", action="store_true", help="list files and target, upload nothing")
    parser.add_argument("--public", action="store_true", help="everybody may read it (default: private)")
    parser.add_argument("--update", action="store_true", help="the repository may exist already")


def run(args: argparse.Namespace) -> None:
    from whetstone.export.push import notes, plan_upload, push
    from whetstone.run.source import find_source
    from whetstone.terminal.display import long_command
    from whetstone.terminal.stages import stage

    upload = plan_upload(find_source(args.source), args.name, private=not args.public)
    visibility = "private" if upload.private else "public"
    total = f"{counted(len(upload.files), 'file')}, {size(sum(upload.files.values()))}"
    print(f"{upload.folder} -> {upload.name} ({visibility}): {total}")
    width = max(map(len, upload.files))
    for name, num_bytes in upload.files.items():
        print(f"  {name:<{width}}  {size(num_bytes):>8}")
    for note in notes(upload):
        print(note)
    if args.dry_run:
        print("Nothing was uploaded (--dry-run).")
        return
    with long_command(), stage("uploading"):
        address = push(upload, update=args.update)
    print(f"It is on the hub: {address}")
