"""completions/tokens_N.npz for the page: the tokens of each completion, with observations between turns."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def tokens(folder: Path, step: int) -> dict[str, Any] | None:
    """The tokens of a step by completion; None where there are none, or the file is broken."""
    try:
        with np.load(folder / "completions" / f"tokens_{step}.npz", allow_pickle=False) as file:
            return {"step": step, **_document(file)}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _document(file: Mapping[str, np.ndarray]) -> dict[str, Any]:
    description = json.loads(file["description"].tobytes())
    ids, numbers, rules = file["token_ids"], file["numbers"].astype(np.float64), file["rules"]
    observed = file["observation_ids"] if "observation_ids" in file else np.zeros(0, dtype=np.int32)
    parts, start = [], 0
    for row in description["completions"]:
        turns = row.pop("turn_tokens", [])
        span = slice(start, start + row["tokens"])
        num_observed = sum(seen for _, seen in turns)
        mask = _observed_mask(turns or [[row["tokens"], 0]])
        part = {
            "ids": _fill(mask, ids[span], observed[:num_observed]).tolist(),
            "rules": _fill(mask, rules[span], 0).tolist(),
            "numbers": {
                name: [None if x != x else round(x, 7) for x in _fill(mask, column[span], np.nan).tolist()]
                for name, column in zip(description["columns"], numbers, strict=True)
                if not np.isnan(column[span]).all()
            },
        }
        parts.append({"row": row, **part, **({"turns": turns} if turns else {})})
        start, observed = span.stop, observed[num_observed:]
    return {"rules": description["rules"], "texts": description["texts"], "parts": parts}


def _observed_mask(turns: list[list[int]]) -> np.ndarray:
    """[tokens] whether a token was observed, from the numbers of sampled and observed tokens of each turn."""
    lengths = [length for turn in turns for length in turn]
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def _fill(mask: np.ndarray, sampled: np.ndarray, observed: np.ndarray | float) -> np.ndarray:
    column = np.zeros(len(mask), dtype=sampled.dtype)
    column[~mask], column[mask] = sampled, observed
    return column
