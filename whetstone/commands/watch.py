"""`whet watch`: look at runs in the browser while they run."""

import argparse
from pathlib import Path

from whetstone.commands.parser import CommandParser, number
from whetstone.errors import UserError
from whetstone.terminal.text import counted

DESCRIPTION = """
Serve a page that shows one run, or all runs of a folder, while they run and afterwards: what the run is
doing, curves, the completions of each prompt with their rewards, and tokens with their logprobs and the rules
that removed them. It reads the run folders only. Ctrl-C ends it.
"""
EXAMPLES = """
whet watch
whet watch outputs/quickstart
whet watch outputs --port 8000
"""
PORT = 8265


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="outputs", help="a run, or a folder of runs (outputs)"
    )
    parser.add_argument("--port", type=number(int, 0), default=PORT, metavar="N", help=f"(default: {PORT})")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="serve other machines, too; the address then has a token (default: this machine alone)",
    )


def run(args: argparse.Namespace) -> None:
    from whetstone.watch.runs import find_runs
    from whetstone.watch.server import WatchServer

    folder = Path(args.folder)
    count = len(find_runs(folder))
    try:
        server = WatchServer(folder, args.host, int(args.port))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"The address {args.host}:{args.port} can't be used ({error}): choose another with --port."
        ) from None
    print(f"{counted(count, 'run')} in {folder}: {server.address}   (Ctrl-C ends this)", flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()
