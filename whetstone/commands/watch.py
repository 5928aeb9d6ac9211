"""`whet watch`: look at runs in the browser while they run."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from whetstone.commands.parser import CommandParser, number
from whetstone.errors import UserError
from whetstone.terminal.text import counted

if TYPE_CHECKING:
    from whetstone.watch.server import WatchServer

DESCRIPTION = """
Serve a page that shows one run, or all runs of a folder, while they run and afterwards: what the run is
doing, curves, the completions of each prompt with their rewards, and tokens with their logprobs and the rules
that removed them; and talk to a checkpoint of a run. It reads the run folders and writes nothing. Ctrl-C
ends it.
"""
EXAMPLES = """
whet watch
whet watch outputs/quickstart
whet watch outputs --port 8000
"""
PORT, NUM_PORTS = 8265, 20


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="outputs", help="a run, or a folder of runs (outputs)"
    )
    parser.add_argument(
        "--port", type=number(int, 0), metavar="N", help=f"(default: {PORT}, or the next one that is free)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="serve other machines, too; the address then has a token (default: this machine alone)",
    )


def run(args: argparse.Namespace) -> None:
    from whetstone.watch.runs import find_runs

    folder = Path(args.folder)
    count = len(find_runs(folder))
    server = _open(folder, args.host, args.port)
    print(f"{counted(count, 'run')} in {folder}: {server.address}   (Ctrl-C ends this)", flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def _open(folder: Path, host: str, port: int | None) -> "WatchServer":
    """On the port that is asked for; without one on the first that is free."""
    from whetstone.watch.server import WatchServer

    last: Exception | None = None
    for candidate in range(PORT, PORT + NUM_PORTS) if port is None else (port,):
        try:
            return WatchServer(folder, host, candidate)
        except (OSError, OverflowError) as error:
            last = error
    reason = last.strerror if isinstance(last, OSError) else last
    raise UserError(
        f"{host}:{PORT if port is None else port} can't be used ({reason}): choose another --port."
    )
