"""Layers of keys as users write them -> our own flat keys, with notes. Knows names, not their values."""

import math
from collections.abc import Iterable
from typing import Any

from whetstone.config.aliases import (
    CONVERTED,
    REFUSED,
    RENAMED,
    REWARDS,
    SECTIONS,
    VALUES,
    WITHOUT_EFFECT,
)
from whetstone.config.data_keys import SETTINGS as DATA_KEYS
from whetstone.config.data_keys import DataKeys, place_settings
from whetstone.config.overrides import COMMAND_LINE, expand_dotted, parse_json
from whetstone.config.unknown import Complaints
from whetstone.config.yaml_text import shorten
from whetstone.errors import UserError

OTHER_NAMES = frozenset().union(RENAMED, CONVERTED, WITHOUT_EFFECT, REFUSED, DATA_KEYS)
_BATCH = "per_device_train_batch_size"
MAPPINGS = ("datasets", "eval_datasets", "lr_scheduler_kwargs", "chat_template_kwargs", *SECTIONS)


class Translation:
    """Layers, the earliest first; a later one wins."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys`: our own."""
        self._keys = frozenset(keys)
        names = (RENAMED, CONVERTED, DATA_KEYS, SECTIONS)
        self.complaints = Complaints(known=self._keys.union(*names))
        self.idle: dict[str, dict[str, list[str]]] = {}  # origin -> reason -> keys without effect
        self._data = DataKeys()
        self._written: dict[str, Any] = {}  # under the names that were used
        self.flat: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, origin: str, values: dict[str, Any]) -> None:
        values = {k: parse_json(k, v) if k in ("datasets", "eval_datasets") else v for k, v in values.items()}
        values = expand_dotted(values, self.flat, MAPPINGS)
        values = _lay_flat(values, origin, self.notes)
        if origin != COMMAND_LINE:  # there the last one wins
            _refuse_two_names(values, origin)
        values = place_settings(values, {**self._written, **self.flat}, self._keys | OTHER_NAMES)
        self._written.update(values)
        ours = self._plain(values, origin)
        ours |= self._converted(values, ours, origin)
        settings, notes = self._data.apply(values, self.flat, ours, origin)
        ours |= settings
        self.notes += notes
        if "dataset_size" in ours and ours["dataset_size"] is None:
            for keys in (ours, self.flat, self.origins):
                keys.pop("dataset_size", None)
        self._use_vllm(ours, origin)
        self._keep_weights(ours, origin)
        size, before = ours.get(_BATCH), self.flat.get(_BATCH, 8)
        if origin == COMMAND_LINE and isinstance(size, int) and isinstance(before, int) and size < before:
            self.notes.append(
                f"{_BATCH} ({size}, was {before}) changes how many completions a step has, not the memory "
                "that it takes: for less memory set micro_batch_tokens, or see `whet plan`."
            )
        self.flat.update(ours)
        self.origins.update(dict.fromkeys(ours, origin))

    def finish(self) -> None:
        """Complain about all that was not understood; note what would be missed in the run."""
        self.complaints.raise_all()
        self.notes += self._data.finish()
        self._accumulation_steps()
        self._logging_fraction()
        self._warmup_of_schedule()
        if "lora_r" in self.flat and "use_peft" not in self.flat:
            origin = self.origins["lora_r"]
            self.notes.append(f"lora_r ({origin}) adds no adapter: set use_peft=true to train one.")
        self.notes += [_idle_note(origin, reasons) for origin, reasons in self.idle.items()]

    def _plain(self, values: dict[str, Any], origin: str) -> dict[str, Any]:
        """Keys that are ours under this or another name."""
        ours: dict[str, Any] = {}
        for key, value in values.items():
            if key in CONVERTED or key in DATA_KEYS:
                continue
            if key in VALUES and isinstance(value, str) and value in VALUES[key]:
                ours[key], more = VALUES[key][value]
                self.notes.append(f"{key}: {value} ({origin}) is taken for {key}: {ours[key]}.{more}")
            elif key == "reward_funcs":
                ours[key] = self._rewards(value, origin)
            elif key in self._keys:
                ours[key] = value
            elif key in RENAMED:
                if value is not None:  # None is the default of another trainer
                    ours[RENAMED[key]] = value
                    self.notes.append(f"{key} ({origin}) is taken for {RENAMED[key]}.")
            elif key in WITHOUT_EFFECT:
                self.idle.setdefault(origin, {}).setdefault(WITHOUT_EFFECT[key], []).append(key)
            elif key in REFUSED:
                harmless, reason = REFUSED[key]
                if value and value not in harmless:
                    self.complaints.refused.append((key, origin, reason))
            else:
                self.complaints.unknown.append((key, origin))
        return ours

    def _converted(self, values: dict[str, Any], ours: dict[str, Any], origin: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key in [key for key in CONVERTED if key in values]:
            try:
                converted = CONVERTED[key](values[key], {**self._written, **self.flat, **ours, **result})
            except UserError:
                raise
            except (TypeError, ValueError, OverflowError) as error:
                raise UserError(f"{key} ({origin}): {error}.") from None
            result.update(converted)
            if converted in ({}, {key: values[key]}):
                continue
            meaning = ", ".join(f"{name}: {entry}" for name, entry in converted.items())
            self.notes.append(f"{key} ({origin}) is taken for {meaning}.")
        return result

    def _rewards(self, value: Any, origin: str) -> Any:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list):
            return value
        ours = [REWARDS.get(name, name) if isinstance(name, str) else name for name in names]
        for name, own in zip(names, ours, strict=True):
            if name != own:
                self.notes.append(f"reward_funcs: {name} ({origin}) is taken for {own}.")
        return ours

    def _use_vllm(self, ours: dict[str, Any], origin: str) -> None:
        """TRL's way to say `rollout_engine: vllm`; false takes back that of an earlier layer."""
        use_vllm = ours.pop("use_vllm", None)
        if use_vllm and ours.setdefault("rollout_engine", "vllm") != "vllm":
            raise UserError(
                f"use_vllm is true ({origin}), but rollout_engine is {ours['rollout_engine']}: leave one of "
                "them out."
            )
        if use_vllm is False and self.flat.get("rollout_engine") == "vllm":
            ours.setdefault("rollout_engine", "native")

    def _keep_weights(self, ours: dict[str, Any], origin: str) -> None:
        """Keep `reward_weights` in step with `reward_funcs` where this layer replaces the functions alone.

        `whet train multi_tasks 'reward_funcs=[accuracy]'` drops `format`, and its weight in the file. A
        function that stays keeps its weight. A new one takes that of the one it replaces in the list, or 1.
        """
        funcs, weights = self.flat.get("reward_funcs"), self.flat.get("reward_weights")
        new = ours.get("reward_funcs")
        if not (isinstance(funcs, list) and isinstance(weights, list) and isinstance(new, list)):
            return
        if "reward_weights" in ours or len(funcs) != len(weights) or funcs == new:
            return
        replaced = {i: weights[i] for i, name in enumerate(funcs) if name not in new}
        matched = [weights[funcs.index(n)] if n in funcs else replaced.get(i, 1.0) for i, n in enumerate(new)]
        if matched != weights:
            ours["reward_weights"] = matched
            shown = ", ".join(f"{name} {weight}" for name, weight in zip(new, matched, strict=True))
            self.notes.append(f"reward_weights follows reward_funcs ({origin}): {shown}.")

    def _accumulation_steps(self) -> None:
        """`batch_counts_as_step` counts accumulation steps; a step is one of the optimizer here."""
        origin = self.origins.pop("batch_counts_as_step", None)
        accumulation = self.flat.get("gradient_accumulation_steps", 1)
        if not self.flat.pop("batch_counts_as_step", False) or not isinstance(accumulation, int):
            return
        for key in ("max_steps", "fixed_eval_steps"):
            value = self.flat.get(key)
            if isinstance(value, int | float) and value > 1 and accumulation > 1:
                steps = self.flat[key] = math.ceil(value / accumulation)
                self.notes.append(f"batch_counts_as_step ({origin}): {key} {value} is taken for {steps}.")

    def _logging_fraction(self) -> None:
        """`logging_steps` below 1 is TRL's fraction of all steps."""
        fraction, steps = self.flat.get("logging_steps"), self.flat.get("max_steps")
        if not isinstance(fraction, float) or not 0 < fraction < 1:
            return
        every, meaning = 1, "every step is shown"
        if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            every = math.ceil(fraction * steps)
            meaning = f"{every} of {steps}"
        self.flat["logging_steps"] = every
        value = f"logging_steps: {fraction} ({self.origins['logging_steps']})"
        self.notes.append(f"{value} is a fraction of all steps: {meaning}.")

    def _warmup_of_schedule(self) -> None:
        """`num_warmup_steps` inside `lr_scheduler_kwargs` is what `warmup_steps` says."""
        settings = self.flat.get("lr_scheduler_kwargs")
        if not isinstance(settings, dict) or not {"num_warmup_steps", "num_training_steps"} & set(settings):
            return
        origin = self.origins["lr_scheduler_kwargs"]
        settings = self.flat["lr_scheduler_kwargs"] = dict(settings)
        settings.pop("num_training_steps", None)
        warmup = settings.pop("num_warmup_steps", None)
        if warmup is None:
            self.notes.append(f"num_training_steps in lr_scheduler_kwargs ({origin}) has no effect.")
            return
        if self.flat.setdefault("warmup_steps", warmup) != warmup:
            raise UserError(
                f"lr_scheduler_kwargs ({origin}) has num_warmup_steps {warmup}, but warmup_steps is "
                f"{self.flat['warmup_steps']}: leave one out."
            )
        self.origins.setdefault("warmup_steps", origin)
        self.notes.append(f"num_warmup_steps ({origin}) is taken for warmup_steps: {warmup}.")


def _idle_note(origin: str, reasons: dict[str, list[str]]) -> str:
    if sum(map(len, reasons.values())) == 1:
        ((reason, (key,)),) = reasons.items()
        return f"{key} ({origin}) has no effect: {reason}."
    groups = "; ".join(f"{', '.join(keys)}: {reason}" for reason, keys in reasons.items())
    return f"Without effect here ({origin}). {groups}."


def _lay_flat(values: dict[str, Any], origin: str, notes: list[str]) -> dict[str, Any]:
    """A nested file laid flat: `model: {path: x}` becomes `model_name_or_path: x`."""
    sections = {key: value for key, value in values.items() if key in SECTIONS and isinstance(value, dict)}
    flat = {key: value for key, value in values.items() if key not in sections}
    for section, inside in sections.items():
        short = SECTIONS[section]
        if section == "model" and inside.get("path"):  # `name` is then a title
            inside = {key: value for key, value in inside.items() if key != "name"}
        for name, value in inside.items():
            key = short.get(str(name), str(name))
            if flat.setdefault(key, value) != value:
                raise UserError(
                    f"{shorten(key)} is given twice ({origin}, once under {section} as "
                    f"{shorten(str(name))}): leave one out."
                )
        names = [(name, short.get(name, name)) for name in map(str, inside)]
        read = ", ".join(name if name == key else f"{name} as {key}" for name, key in names)
        more = ""
        if section == "lora" and inside and "use_peft" not in {RENAMED.get(key, key) for key in flat}:
            flat["use_peft"] = True
            more = "; use_peft: true with it"
        notes.append(f"{section} ({origin}) is a section, whose keys are read as the file's: {read}{more}.")
    return flat


def _refuse_two_names(values: dict[str, Any], origin: str) -> None:
    """Raise if two names in a file give one key two values."""
    first: dict[str, str] = {}
    for key, value in values.items():
        name = RENAMED.get(key, key)
        other = first.setdefault(name, key)
        if values[other] != value:
            raise UserError(f"{other} and {key} ({origin}) both mean {name}, but differ: leave one out.")
