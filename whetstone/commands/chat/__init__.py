"""`whet chat`: a conversation with a model in the terminal; piped input is answered once."""

import argparse
import contextlib
import sys

from whetstone.commands.parser import CommandParser
from whetstone.commands.sampling import add_sampling, open_sampler, read_input, sampling_settings
from whetstone.errors import UserError

DESCRIPTION = """
Talk to a model: that of a run (its final_model, or its newest checkpoint), of a checkpoint, of a model
folder, or pebble, smollm2-135m or a hub name. A run brings its developer prompt, chat template and sampling.
/help lists the commands of the conversation. Ctrl-C stops an answer, Ctrl-D leaves.
Piped input is one question: its answer is printed, and nothing else.
"""
EXAMPLES = """
whet chat outputs/quickstart
whet chat smollm2-135m --system 'Answer in one sentence.'
whet chat outputs/quickstart/checkpoint-30 --temperature 0
echo 'Why is the sky blue?' | whet chat smollm2-135m
"""


def add_arguments(parser: CommandParser) -> None:
    add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    question = None
    if sys.stdin is None or not sys.stdin.isatty():
        question = read_input("-").decode("utf-8", errors="replace").strip()
        if not question:
            raise UserError(
                "There is no question in the piped input: write one into it, or start `whet chat` in a "
                "terminal."
            )
    sampler = open_sampler(args)
    from whetstone.commands.chat.session import Session
    from whetstone.inference.conversation import Conversation

    chat = Conversation(sampler, system=args.system, seed=args.seed, **sampling_settings(args))
    session = Session(chat, is_interactive=question is None)
    if question is not None:
        session.answer(chat.stream(question))
        return
    from whetstone.commands.chat.reader import Reader

    session.greet()
    with Reader() as reader, contextlib.suppress(EOFError):
        while session.handle(reader.read()):
            pass
