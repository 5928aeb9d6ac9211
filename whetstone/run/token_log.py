"""Tokens of some groups of each step: `completions/tokens_N.npz`, written after the update.

Arrays that `numpy.load` reads: `token_ids`, `numbers` (a row for each column), `rules` (a bit for each rule
that removed or bounded the token), and `description`: JSON in UTF-8 with names, the texts of tokens, and the
completions as completions/step_N.jsonl has them. `observation_ids` are what the policy saw after its turns;
`turn_tokens` of a completion has the numbers of sampled and of observed tokens of each turn.
"""

import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from whetstone import seeds
from whetstone.config import Config
from whetstone.files import atomic_write, json_safe
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import all_gather_objects
from whetstone.run.completions import completion_row
from whetstone.types import Group, Rollout
from whetstone.update.token_table import NUMBERS, RULES, TokenRows, TokenTable

EQUAL_REWARDS = 1 << RULES.index("equal_rewards")


@dataclass
class TokenLog:
    folder: Path  # of the run
    config: Config
    policy: Policy
    table: TokenTable

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """The tokens of `log_tokens_groups` groups, chosen by the seed; a collective call."""
        run = self.config.run
        if not run.log_tokens_groups or self.config.loss.is_supervised:
            return
        chosen = choose_groups(seeds.seed(run.seed, "tokens", step), len(groups), run.log_tokens_groups)
        size = len(groups[0].rollouts)
        wanted = {group * size + sample for group in chosen for sample in range(size)}
        rows: dict[int, TokenRows] = {}
        for own in all_gather_objects(self.policy.ranks, self.table.rows(wanted)):
            rows |= own
        if self.policy.ranks.is_main:
            content = pack_tokens(step, groups, sorted(wanted), rows, self.policy.tokenizer)
            atomic_write(tokens_file(self.folder, step), content)
            thin_out(self.folder, run.log_tokens_mb * 1e6)


def tokens_file(folder: Path, step: int) -> Path:
    return folder / "completions" / f"tokens_{step}.npz"


def choose_groups(seed: int, num_groups: int, count: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(num_groups), min(count, num_groups)))


def pack_tokens(
    step: int, groups: Sequence[Group], indices: Sequence[int], rows: dict[int, TokenRows], tokenizer: Any
) -> bytes:
    """One file: the columns of all completions, one after the other."""
    completions, numbers, rules = [], [], []
    ids: list[int] = []
    observed: list[int] = []
    for index in indices:
        group, sample = divmod(index, len(groups[0].rollouts))
        rollout = groups[group].rollouts[sample]
        own = rows.get(index) or _without_update(rollout.completion.logprobs)
        completions.append({**completion_row(step, groups[group], sample), "tokens": len(own.rules)})
        if rollout.episode is not None:
            seen = list(observations(rollout))
            lengths = [len(turn.completion.token_ids) for turn in rollout.turns]
            completions[-1]["turn_tokens"] = [
                list(pair) for pair in zip(lengths, map(len, seen), strict=True)
            ]
            observed += [token for part in seen for token in part]
        ids += rollout.completion.token_ids
        numbers.append(own.numbers)
        rules.append(own.rules)
    table = np.concatenate(numbers, axis=1)
    present = [row for row, values in enumerate(table) if not np.isnan(values).all()]  # no critic: no values
    description = {
        "step": step,
        "columns": [NUMBERS[row] for row in present],
        "rules": list(RULES),
        "completions": completions,
        "texts": {token: token_text(tokenizer, token) for token in sorted({*ids, *observed})},
    }
    text, buffer = json.dumps(json_safe(description), ensure_ascii=False), io.BytesIO()
    np.savez(
        buffer,
        token_ids=np.array(ids, dtype=np.int32),
        observation_ids=np.array(observed, dtype=np.int32),
        numbers=table[present],  # float32: logprobs of trainer and sampler differ by far less than 1e-3
        rules=np.concatenate(rules),
        description=np.frombuffer(text.encode(errors="replace"), dtype=np.uint8),
    )
    return buffer.getvalue()


def observations(rollout: Rollout) -> Iterator[tuple[int, ...]]:
    """What the policy saw behind each turn; where the history was rewritten then, what was new in it."""
    for branch, following in zip_longest(rollout.branches, rollout.branches[1:]):
        yield from (turn.observation_ids for turn in branch.turns[:-1])
        yield branch.turns[-1].observation_ids if following is None else following.context_ids


def _without_update(logprobs: Sequence[float]) -> TokenRows:
    """A completion whose group earned the same throughout: it was sampled, and left out of the update."""
    numbers = np.full((len(NUMBERS), len(logprobs)), np.nan, dtype=np.float32)
    numbers[NUMBERS.index("sampler_logprob")] = logprobs
    numbers[NUMBERS.index("advantage")] = 0
    numbers[NUMBERS.index("weight")] = 0
    return TokenRows(numbers=numbers, rules=np.full(len(logprobs), EQUAL_REWARDS, dtype=np.uint8))


def token_text(tokenizer: Any, token: int) -> str:
    """What a token stands for; its name where it is a part of a character only."""
    text = tokenizer.decode([token])
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(token))


def thin_out(folder: Path, limit: float) -> None:
    """Keep the folder below `limit` bytes: remove the files whose neighbors are nearest, never the newest."""
    files = {int(path.stem.removeprefix("tokens_")): path for path in folder.glob("completions/tokens_*.npz")}
    sizes = {step: path.stat().st_size for step, path in files.items()}
    while sum(sizes.values()) > limit and len(sizes) > 2:
        steps = sorted(sizes)
        inner = range(1, len(steps) - 1)
        nearest = min(inner, key=lambda index: steps[index + 1] - steps[index - 1])
        files[steps[nearest]].unlink(missing_ok=True)
        del sizes[steps[nearest]]
