"""Text for people: counts, durations, control characters written out, lines wrapped with an indent.

What a model wrote is hostile input: an escape sequence in it could move the cursor, change the window's title
or hide what was printed before. Everything that goes to a terminal or a log passes `escape_controls`.
"""

import re
import textwrap

# C0 and C1 controls but newline and tab, line and paragraph separators, marks that change the direction of
# text, and lone surrogates, which no stream can encode.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]"
)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `1,200 steps`, `3 batches` (the plural is given where it is not noun + s)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def times(number: float) -> str:
    """`3.5 times`, `640 times`."""
    return f"{number:.2g} times" if number < 10 else f"{number:,.0f} times"


def duration(seconds: float) -> str:
    """`0:07`, `1:42`, `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def cut(text: str, width: int) -> str:
    """At most `width` characters; the last is `…` where more follow."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def escape_controls(text: str) -> str:
    """The same text with every control character written out: `\\x1b[31m`, `\\r`, `\\u202e`."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def wrap(text: str, width: int, indent: int | None = None) -> str:
    """Lines of at most `width`; a continuation has `indent` spaces (default: its indent and two more).

    Words are never broken: a path or a command stays whole, so that it can be copied.
    """
    return "\n".join(_wrap_line(line, width, indent) for line in text.split("\n"))


def _wrap_line(line: str, width: int, indent: int | None) -> str:
    if len(line) <= width:
        return line
    own = len(line) - len(line.lstrip())
    rest = " " * (own + 2 if indent is None else indent)
    wrapper = textwrap.TextWrapper(max(20, width), subsequent_indent=rest, break_long_words=False)
    wrapper.break_on_hyphens = False
    return wrapper.fill(line)


def size(num_bytes: int) -> str:
    """`812 B`, `5.4 MB`, `1.2 GB`."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
