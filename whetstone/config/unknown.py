"""Keys that are rejected, all in one message: unknown ones with a suggestion, refused ones with the reason.

A synonym is better than the nearest spelling, and no suggestion is better than a misleading one.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from whetstone.config.tables import by_name, detect, table
from whetstone.config.yaml_text import shorten
from whetstone.errors import UserError

SYNONYMS = by_name(table("others")["suggestions"])  # names of others that are not accepted -> our key
_CUTOFF = 0.82  # of difflib: one or two letters off


@dataclass
class Complaints:
    """What can't be taken, gathered over all layers so that one message names everything."""

    known: frozenset[str]  # every name that is accepted
    unknown: list[tuple[str, str]] = field(default_factory=list)  # (key, origin)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # (key, origin, reason)

    def raise_all(self) -> None:
        sentences, entries = [], []
        for key, origin in self.unknown:
            hint = f", did you mean '{name}'?" if (name := suggest(key, self.known)) else ""
            entries.append(f"'{shorten(key)}' ({origin}{hint})")
        if entries:
            noun = "is no key" if len(entries) == 1 else "are no keys"
            sentences.append(f"There {noun} {', '.join(entries)}. `whet config` lists them all.")
        sentences += [f"{key} ({origin}) is not supported: {reason}." for key, origin, reason in self.refused]
        if (project := detect([key for key, _ in self.unknown])) != "trl":
            sentences.append(f"A file of {project} is translated by `whet import FILE -o NEW.yaml`.")
        if sentences:
            raise UserError(" ".join(sentences))


def suggest(key: str, known: Iterable[str]) -> str | None:
    """What was probably meant; None where a guess would mislead."""
    plain = key.lower().replace("-", "_").split(".")[-1]
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    if len(plain) > 100:
        return None
    names = list(known)
    if plain in names:
        return plain
    close = difflib.get_close_matches(plain, [*names, *SYNONYMS], n=1, cutoff=_CUTOFF)
    return SYNONYMS.get(close[0], close[0]) if close else None
