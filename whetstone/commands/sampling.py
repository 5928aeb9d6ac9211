"""The arguments of commands that sample from a model: which model, and how to sample."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whetstone.commands.parser import CommandParser, number
from whetstone.errors import UserError

MAX_BYTES = 100_000_000  # of prompts

if TYPE_CHECKING:
    from whetstone.inference.sampler import Sampler


def add_sampling(parser: CommandParser) -> None:
    parser.add_argument(
        "model", metavar="RUN|CHECKPOINT|MODEL", help="a run, a checkpoint, a model folder or a model's name"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt; '' for none (default: the run's)")
    parser.add_argument(
        "--temperature", type=number(float), metavar="X", help="0 is greedy (default: the evaluation's)"
    )
    parser.add_argument("--top-p", type=number(float), metavar="X", help="nucleus sampling")
    parser.add_argument("--max-tokens", type=number(int, 1), metavar="N", help="tokens of an answer at most")
    parser.add_argument("--seed", type=number(int), metavar="N", default=0, help="(default: 0)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU, if there is one"
    )


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Sampler.sample` that were given."""
    names = ("temperature", "top_p", "max_tokens")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def read_input(name: str) -> bytes:
    """A file, or standard input (-), which may be closed; a device may have no end."""
    if name == "-":
        data = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"The prompts of {name} are larger than {MAX_BYTES // 10**6} MB: split them.")
    return data


def open_sampler(args: argparse.Namespace) -> "Sampler":
    """Load the model. What that prints goes to standard error: standard output is for answers."""
    from whetstone.terminal.display import long_command
    from whetstone.terminal.stages import stage

    with contextlib.redirect_stdout(sys.stderr), long_command():
        with stage("loading torch"):
            from whetstone.inference.sampler import Sampler
        with stage("loading the model"):
            return Sampler.open(args.model, device=args.device)
