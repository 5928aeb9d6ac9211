"""What a user's file for `accelerate launch` asks for, as our keys: ZeRO and FSDP, precision, clipping.

accelerate hands its file over in environment variables, which this module alone reads. It only starts the
processes: FSDP2 shards weights, gradients and optimizer states over them, as ZeRO-3 does. The run's own
configuration wins. A setting that is not taken over is named with a reason of config/projects/accelerate.yml.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.config.tables import table
from whetstone.errors import UserError

NOTHING = ("", "no", "none", "false")  # values that ask for nothing


@dataclass(frozen=True, kw_only=True)
class Request:
    """One setting of a file of accelerate or DeepSpeed."""

    name: str
    value: str
    origin: str

    @property
    def keys(self) -> dict[str, Any]:
        """Our key and its value; empty where we have none for it."""
        key, values = self._part("names"), self._part("values")
        if values:
            return {key: values[self.value]} if self.value in values else {}
        return {key: _number(self.value)} if key and self.value not in ("auto", *NOTHING) else {}

    def outcome(self, flat: Mapping[str, Any], origins: Mapping[str, str]) -> str | None:
        """What became of it in the configuration `flat`; None: what it asks for is so anyway."""
        for key, ours in self.keys.items():
            if flat[key] == ours:
                return f"is taken for {key}: {str(ours).lower()}" if origins[key] == self.origin else None
            if (key, flat[key]) == ("cpu_offload", "all"):  # which includes the optimizer
                return None
            return f"has no effect: {key} is {str(flat[key]).lower()} ({origins[key]})"
        decides = self._part("names") and self.value == "auto"
        same = self._name in table("accelerate")["same"].get(self.value, "").split()
        if same or self.value in (*NOTHING, "" if decides else "auto"):
            return None
        reason = "the configuration of the run decides" if decides else self._part("without")
        return f"has no effect: {reason or 'nothing here depends on it'}"

    @property
    def _name(self) -> str:
        return self.name.removeprefix("zero_optimization.")

    def _part(self, part: str) -> Any:
        return table("accelerate")[part].get(self._name)


def requests(environment: Mapping[str, str]) -> list[Request]:
    """All settings that accelerate hands over; those of a JSON file of DeepSpeed are the last."""
    names = ("mixed_precision", "dynamo_backend", "gradient_accumulation_steps", "gradient_clipping")
    settings = {name: environment.get(f"ACCELERATE_{name.upper()}", "none") for name in names}
    settings["use_megatron_lm"] = environment.get("ACCELERATE_USE_MEGATRON_LM", "none")
    for use, prefix, ours in (
        ("DEEPSPEED", "ACCELERATE_DEEPSPEED_", ""),
        ("FSDP", "FSDP_", "fsdp_"),
        ("PARALLELISM_CONFIG", "PARALLELISM_CONFIG_", "parallelism_config_"),
    ):
        for name, value in environment.items():
            if name.startswith(prefix) and environment.get(f"ACCELERATE_USE_{use}", "").lower() == "true":
                settings[ours + name.removeprefix(prefix).lower()] = value
    file = Path(settings.pop("config_file", "none"))
    rows = [("accelerate", *setting) for setting in settings.items()]
    rows += [(file.name, *setting) for setting in (_read(file) if str(file) != "none" else ())]
    return [Request(name=name, value=value.lower(), origin=origin) for origin, name, value in rows]


def notes(requested: list[Request], flat: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """One line for each outcome, with the settings that have it."""
    settings: dict[str, list[str]] = {}
    for request in requested:
        outcome = request.outcome(flat, origins)
        if outcome is not None:
            settings.setdefault(outcome, []).append(f"{request.name} {request.value} ({request.origin})")
    return [
        f"{', '.join(names)} {outcome.replace('has', 'have', 1) if len(names) > 1 else outcome}."
        for outcome, names in settings.items()
    ]


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse to be alone where several were asked for.

    Without GPUs `accelerate launch --num_processes 2` starts one process all the same, and with a hostfile
    several that know of each other by MPI only. Either way it sets an address, and no number of ranks.
    """
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    if by_accelerate and "MASTER_PORT" in environment and "WORLD_SIZE" not in environment:
        raise UserError(
            "accelerate launch was asked for several processes and started this one alone, as it does on a "
            "machine without GPUs: add --multi_gpu (on CPUs too: it makes accelerate start them all), or use "
            "`torchrun --nproc_per_node=2 -m whetstone train ...`. Unset MASTER_PORT if one was meant."
        )


def _read(file: Path) -> Iterator[tuple[str, str]]:
    """The settings of a JSON file of DeepSpeed, with the names of their sections."""

    def flatten(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for name, value in section.items():
            if isinstance(value, dict):
                yield from flatten(value, f"{prefix}{name}.")
            else:
                yield prefix + name, str(value)

    try:
        yield from flatten(json.loads(file.read_text(encoding="utf-8")), "")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"deepspeed_config_file {file} can't be read as JSON ({error}): correct it, or leave it out and "
            "set what it asks for in the configuration of the run."
        ) from None


def _number(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text  # the key says what it accepts
    return int(number) if number.is_integer() else number
