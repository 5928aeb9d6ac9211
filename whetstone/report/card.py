"""The model card of a run's model: gathers what model/card.py writes down from the files of the run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whetstone.errors import UserError
from whetstone.evaluation.conversation import conversation
from whetstone.files import atomic_write
from whetstone.model.card import (
    ADAPTER_CONFIG,
    CardFacts,
    Sample,
    base_of,
    card_text,
    license_of,
    public_name,
)
from whetstone.model.manifest import CARD
from whetstone.report.examples import Pair, pairs
from whetstone.report.read import read_run
from whetstone.run.record import read_mapping, read_sessions


def write_card(
    folder: Path,
    run: Path | None,
    *,
    step: int,
    source: Path | None = None,
    name: str | None = None,
    title: str | None = None,
    notes: Sequence[str] = (),
    gguf: Sequence[str] = (),
) -> None:
    """Write README.md of `folder`, a model of `run` (None: of no run), copied from the folder `source`.
    `name` is what the folder will be called.

    Only the final model has results: those of a checkpoint in between were not measured.
    """
    source = source or folder
    config = {} if run is None else read_mapping(run / "config.yaml") or {}
    is_final = run is not None and source.name == "final_model"
    base = base_of(source, config)
    facts = CardFacts(
        title=title or str(config.get("run_name") or folder.name),
        folder=name or folder.name,
        base=public_name(base),
        is_adapter=(folder / ADAPTER_CONFIG).is_file(),
        license=license_of(base),
        config=config,
        results=(read_mapping(run / "train_results.json") or {}) if run is not None and is_final else {},
        step=step,
        command=_first_command(run),
        samples=_samples(run) if run is not None and is_final else (),
        notes=notes,
        gguf=gguf,
    )
    try:
        text = card_text(facts)
    except (KeyError, TypeError, ValueError, AttributeError):  # files of the run were damaged or edited
        text = card_text(replace(facts, config={}, results={}, samples=()))
    atomic_write(folder / CARD, text)


def _first_command(run: Path | None) -> str | None:
    """The command that reproduces the run: later ones resume it."""
    sessions = [] if run is None else read_sessions(run)
    command = sessions[0].get("command") if sessions else None
    return str(command) if command else None


def _samples(run: Path) -> list[Sample]:
    """The examples of the report, as far as the run has an evaluation."""
    try:
        return [sample for pair in pairs(read_run(run))[:5] if (sample := _sample(pair)) is not None]
    except (UserError, KeyError, TypeError):  # files that are missing or damaged
        return []


def _text(entry: dict[str, Any]) -> str:
    """What was said, with the names of those who said it where there are several."""
    said = conversation(entry.get("turns"), str(entry["completion"]))
    return said[0][1] if len(said) == 1 else "\n\n".join(f"[{who}]\n{text}" for who, text in said)


def _sample(pair: Pair) -> Sample | None:
    record = pair.sides[-1][1]
    questions = [str(message["content"]) for message in record["messages"] if message["role"] == "user"]
    if not questions:
        return None
    return Sample(
        kind=pair.kind,
        question=questions[-1],
        gold=record.get("gold"),
        completions=[(step, _text(entry)) for step, entry in pair.sides],
    )
