"""The conversation in the terminal: answers as they are sampled, and the commands that begin with a slash.

What a model wrote is hostile: every piece passes `escape_controls`. A piece never ends within a character.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType

import rich
from rich import box
from rich.table import Table
from rich.text import Text

from whetstone.errors import UserError, did_you_mean
from whetstone.files import atomic_write
from whetstone.inference.answers import Answer, Piece
from whetstone.inference.conversation import Conversation
from whetstone.inference.sampler import Sampler
from whetstone.terminal.display import display, say
from whetstone.terminal.stages import stage
from whetstone.terminal.text import counted, escape_controls
from whetstone.types import Finish

COMMANDS = {  # command -> argument and meaning
    "/system": ("TEXT", "set the system prompt; `none` removes it, without TEXT it is shown"),
    "/temperature": ("X", "set the temperature; 0 is greedy"),
    "/max-tokens": ("N", "tokens of an answer at most"),
    "/again": ("", "another answer to the last question"),
    "/compare": ("[TEXT]", "before and after training side by side, on TEXT or the last question"),
    "/clear": ("", "begin a new conversation"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/help": ("", "this list"),
    "/quit": ("", "leave, as Ctrl-D does"),
}
NONE = "none"  # `/system none`
EXAMPLE_LENGTH = 160  # characters of a question that is shown as an example
EXAMPLE_FILE_BYTES = 20_000_000


def example_question(run: Path) -> str | None:
    """A short question of the run's evaluation: a small model answers no others. None: there is none."""
    path = run / "eval_results" / "eval_step_0.json"
    try:
        if path.stat().st_size > EXAMPLE_FILE_BYTES:
            return None
        records = json.loads(path.read_text(encoding="utf-8"))["completions"]
        questions = [record["messages"][-1]["content"] for record in records]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    lines = [text.strip() for text in questions if isinstance(text, str)]
    return next((text for text in lines if 0 < len(text) <= EXAMPLE_LENGTH and "\n" not in text), None)


class Interrupt:
    """Whether Ctrl-C was pressed during an answer; a second one ends the program."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Inside, Ctrl-C sets a flag: an engine that is stopped between two tokens can be used again."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Session:
    """`is_interactive`: notes for a reader are printed, beside the answers."""

    def __init__(self, chat: Conversation, *, is_interactive: bool = True) -> None:
        self.chat, self.is_interactive = chat, is_interactive
        self._base: Sampler | None = None
        self._handlers: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/temperature": self._temperature,
            "/max-tokens": self._max_tokens,
            "/again": self._again,
            "/compare": self._compare,
            "/clear": self._clear,
            "/save": self._save,
            "/help": self._help,
        }

    def greet(self) -> None:
        sampler = self.chat.sampler
        name, policy = sampler.source.model, sampler.policy
        millions = sum(parameter.numel() for parameter in policy.model.parameters()) / 1e6
        precision = str(policy.dtype).removeprefix("torch.")
        say(f"{name}: {millions:,.1f} million parameters, {precision} on {policy.device}.")
        if sampler.system is not None and self.chat.system is None:
            say(f"System prompt of the run: {sampler.system.strip()}", style="dim")
        example = None if sampler.source.run is None else example_question(sampler.source.run)
        if example is not None:
            say(f"A question of its evaluation: {example}", style="dim")
        say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")

    def handle(self, line: str) -> bool:
        """A question or a command; whether the conversation continues."""
        name, _, rest = line.strip().partition(" ")
        try:
            if not line.startswith("/"):
                self.answer(self.chat.stream(line.strip()))
            elif name in ("/quit", "/exit"):
                return False
            elif name in self._handlers:
                self._handlers[name](rest.strip())
            else:
                hint = did_you_mean(name, COMMANDS) or ":"
                raise UserError(
                    f"There is no command {name[:50]}{hint} /help lists them, and a space before the slash "
                    "sends it to the model."
                )
        except UserError as error:
            say(str(error), style="yellow")
        return True

    def answer(self, pieces: Generator[Piece]) -> None:
        """Print the pieces of an answer while they are sampled."""
        text, answer = "", None
        with interrupts() as interrupt, contextlib.closing(pieces):
            for piece in pieces:
                text, answer = text + piece.text, piece.answer
                sys.stdout.write(escape_controls(piece.text))
                sys.stdout.flush()
                if interrupt.is_set:
                    break
        if not text.endswith("\n"):
            print(flush=True)
        if answer is not None:
            self._note_end(answer)
        elif interrupt.is_set and not self.is_interactive:
            raise KeyboardInterrupt

    def _note_end(self, answer: Answer) -> None:
        if answer.finish is Finish.LENGTH and self.is_interactive:
            number = counted(len(answer.token_ids), "token")
            say(f"(cut off after {number}: /max-tokens N allows more)", style="dim")

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = "" if text == NONE else text
        shown = self.chat.sampler.system if self.chat.system is None else self.chat.system
        say(f"System prompt: {shown}" if shown else "There is no system prompt.", style="dim")

    def _temperature(self, text: str) -> None:
        self._set("temperature", _number(float, text, "/temperature 0.7"))

    def _max_tokens(self, text: str) -> None:
        self._set("max_tokens", _number(int, text, "/max-tokens 500"))

    def _set(self, name: str, value: float) -> None:
        self.chat.sampler.sampling(**{**self.chat.settings, name: value})  # checks it
        self.chat.settings[name] = value
        say(f"{name} {value:g}", style="dim")

    def _again(self, _: str) -> None:
        self.answer(self.chat.again())

    def _clear(self, _: str) -> None:
        self.chat.clear()
        say("A new conversation begins.", style="dim")

    def _save(self, text: str) -> None:
        path = Path(text).expanduser()
        if not text or path.exists():
            reason = "exists already" if text else "has no name"
            raise UserError(f"The file {text} {reason}: give the name of a new one, /save talk.json.")
        system = self.chat.sampler.system if self.chat.system is None else self.chat.system
        head = [{"role": "system", "content": system}] if system else []
        document = json.dumps([*head, *self.chat.messages], ensure_ascii=False, indent=1)
        try:
            atomic_write(path, document + "\n")
        except OSError as error:
            raise UserError(f"{path} can't be written ({error.strerror}): choose another name.") from None
        say(f"{counted(len(self.chat.messages), 'message')} in {path}.", style="dim")

    def _compare(self, text: str) -> None:
        """Both models on the same messages, with the same seed and settings; the conversation stays."""
        messages = [{"role": "user", "content": text}] if text else self.chat.open_messages()
        options = self.chat.next_options()
        texts = []
        with interrupts() as interrupt, display():
            if self._base is None:
                with stage("loading the model before training"):
                    self._base = self.chat.sampler.open_base()
            for sampler in (self._base, self.chat.sampler):
                pieces = sampler.stream(messages, **options)
                with stage(f"sampling from {sampler.source.model}"), contextlib.closing(pieces):
                    texts.append("")
                    for piece in pieces:
                        texts[-1] += piece.text
                        if interrupt.is_set:
                            return
        table = Table(box=box.HORIZONTALS, expand=True, pad_edge=False)
        names = (f"before: {self._base.source.model}", f"after: {self.chat.sampler.source.model}")
        for name in names:
            table.add_column(Text(escape_controls(name)), ratio=1, overflow="fold")
        table.add_row(*(Text(escape_controls(text).strip()) for text in texts))
        rich.get_console().print(table)

    def _help(self, _: str) -> None:
        for name, (argument, meaning) in COMMANDS.items():
            say(f"  {f'{name} {argument}':<20} {meaning}")
        say('A line that ends in a backslash continues on the next one; """ begins and ends several lines.')


def _number(kind: type, text: str, example: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"'{text[:50]}' is not a number: write {example}.") from None
