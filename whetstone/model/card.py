"""The README.md (model card) of a saved model: what was trained from what, what was measured, how to load it.

No path of this machine is written. Samples are text of a model: hostile, so they stand in code blocks that
they can't end, with control characters written out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from whetstone import __version__
from whetstone.config import build, flatten
from whetstone.model.hub import LICENSES, PEBBLE, SMOLLM2, SMOLLM2_HUB, cache_folder
from whetstone.model.manifest import CARD
from whetstone.terminal.text import cut, escape_controls

ADAPTER_CONFIG = "adapter_config.json"
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LICENSE = re.compile(r"[\w. -]{1,60}")
_PATH = re.compile(r"(^|[\s=\[,'\"])(?:~|\.{1,2})?/(?:[^\s'\",\]]*/)?(?=[\w.])")
_MAX_SAMPLE = 800  # characters
# Settings of this machine, or of what is printed and kept: no part of a recipe.
_LOCAL = {
    "output_dir", "report_to", "wandb_project", "wandb_name", "wandb_entity", "wandb_tags", "logging_steps",
    "watch", "log_completions_steps",
    "log_tokens_groups", "log_tokens_mb", "auto_resume", "resume_from_checkpoint", "overwrite_output_dir",
    "eval_num_examples_to_print", "eval_only", "checkpoint_path", "reward_workers", "rollout_servers",
    "weight_transfer_dir", "server_base_url", "server_host", "push_to_hub", "hub_model_id",
    "hub_private_repo",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A problem of the evaluation, and the completions of some steps."""

    kind: str  # `wrong, then right`
    question: str
    gold: str | None
    completions: Sequence[tuple[int, str]]  # (step, text)


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says of a model."""

    title: str
    folder: str  # its name, in the code that loads it
    base: str  # as `public_name` has it
    is_adapter: bool
    license: str | None  # of the base; None: not stated
    config: Mapping[str, Any]  # of the run; empty: not trained by a run of ours
    results: Mapping[str, Any]  # train_results.json; empty: not measured
    step: int = 0
    command: str | None = None  # that trained and measured it
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()  # limits of this copy of the weights
    gguf: Sequence[str] = ()  # names of files


def public_name(base: str) -> str:
    """The name by which a base model is known elsewhere: an alias or a hub name; a folder stays a folder."""
    if base == str(Path(__file__).resolve().parent / "pebble"):
        return PEBBLE
    if base in (SMOLLM2, str(cache_folder() / SMOLLM2)):
        return SMOLLM2_HUB
    snapshot = _SNAPSHOT.search(base)
    return f"{snapshot[1]}/{snapshot[2]}" if snapshot else base


def license_of(base: str) -> str | None:
    """The license in the card of a base model on this disk, or of one that we know; None: not stated."""
    if public_name(base) in LICENSES:
        return LICENSES[public_name(base)]
    path = Path(base) / CARD
    if not Path(base).is_dir() and _HUB_NAME.fullmatch(base):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base, CARD)
        path = Path(cached) if isinstance(cached, str) else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        stated = yaml.safe_load(text.split("---", 2)[1])["license"]
    except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return None
    return stated if isinstance(stated, str) and _LICENSE.fullmatch(stated) else None


def finish_adapter(folder: Path) -> None:
    """Name the base of a saved adapter publicly, sort what peft does not, and replace peft's empty card."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    settings = json.loads(path.read_text(encoding="utf-8"))
    # peft writes the names of modules in the order of a set, which differs from process to process.
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"] = sorted(settings["target_modules"])
    location = str(settings["base_model_name_or_path"])
    base = settings["base_model_name_or_path"] = public_name(location)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    facts = CardFacts(
        title=f"LoRA adapter of {shown_name(base)}",
        folder="final_model",
        base=base,
        is_adapter=True,
        license=license_of(location),
        config={},
        results={},
    )
    (folder / CARD).write_text(card_text(facts), encoding="utf-8")


def base_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Where the base of a saved model is: an adapter names it, otherwise the configuration does."""
    settings = folder / ADAPTER_CONFIG
    if settings.is_file():
        return str(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"])
    return str(config.get("model_name_or_path") or folder)


def card_text(facts: CardFacts) -> str:
    """The text of a card."""
    sections = [
        _front_matter(facts),
        f"# {_plain(facts.title)}",
        _summary(facts),
        "## Measured\n\n" + _measured(facts),
        _usage(facts),
        *([_data(facts.config), _recipe(facts)] if facts.config else []),
        *([_samples(facts.samples)] if facts.samples else []),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(facts)),
        f"## License\n\nBase model: {facts.license or 'not stated'}"
        + ("." if facts.license else ": ask its owner before you pass this model on."),
    ]
    return "\n\n".join(sections) + "\n"


def shown_name(base: str) -> str:
    """A base model in a sentence: of a folder its name only."""
    if base == PEBBLE:
        return "pebble (the model inside the package whetstone)"
    return base if _HUB_NAME.fullmatch(base) else f"a model in a local folder ({_plain(Path(base).name)})"


def is_hub_name(base: str) -> bool:
    """Whether others can load it by this name."""
    return _HUB_NAME.fullmatch(base) is not None and not Path(base).is_dir()


def without_paths(text: str) -> str:
    """The same text with the folders of every absolute or relative path left out."""
    return _PATH.sub(r"\1", text)


def recipe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that are not defaults, without those of this machine and without its folders."""
    defaults = flatten(build({}))
    own = {k: v for k, v in config.items() if k in defaults and k not in _LOCAL and v != defaults[k]}
    own["model_name_or_path"] = public_name(str(config.get("model_name_or_path")))
    return {key: _map_texts(value) for key, value in own.items()}


def _front_matter(facts: CardFacts) -> str:
    fields: dict[str, Any] = {}
    if _HUB_NAME.fullmatch(facts.base):
        fields["base_model"] = facts.base
    if facts.license:
        fields["license"] = facts.license
    fields["library_name"] = "peft" if facts.is_adapter else "transformers"
    fields["pipeline_tag"] = "text-generation"
    more = (["lora"] if facts.is_adapter else []) + (["gguf"] if facts.gguf else [])
    fields["tags"] = ["reinforcement-learning", "whetstone", *more]
    return "---\n" + yaml.safe_dump(fields, sort_keys=False) + "---"


def _summary(facts: CardFacts) -> str:
    if not facts.config:
        what = "An adapter of" if facts.is_adapter else "A copy of the weights of"
        return f"{what} {shown_name(facts.base)}, written by whetstone {__version__}."
    tasks = ", ".join(facts.config.get("datasets") or {})
    how = f"LoRA, rank {facts.config['lora_r']}" if facts.config.get("use_peft") else "all weights"
    if facts.config.get("use_peft") and not facts.is_adapter:
        how += ", merged into the base"
    return (
        f"{shown_name(facts.base)}, trained by reinforcement learning with verifiable rewards on {tasks} "
        f"({how}, {facts.step:,} steps, whetstone {__version__})."
    )


def _measured(facts: CardFacts) -> str:
    results = facts.results
    if not results:
        return "Nothing: the accuracy of these weights was not measured."
    if "accuracy_after" not in results:
        return "Nothing: the run had no evaluation."
    rows = ["| | before | after |", "|---|---|---|"]
    sampled = f"accuracy at temperature {results['eval_temperature']:g}"
    for name, key in ((sampled, "accuracy"), ("greedy accuracy", "greedy")):
        before, after = results.get(f"{key}_before"), results.get(f"{key}_after")
        if before and after and results.get("is_judged", True):
            rows.append(f"| {name} | {_share(before)} | {_share(after)} |")
    before, after = results.get("reward_before"), results.get("reward_after")
    if before and after:
        rows.append(f"| mean reward | {_number(before)} | {_number(after)} |")
    num = f"{results['accuracy_after']['num_problems']:,} fixed problems that it was not trained on"
    lines = [*rows, "", f"On {num}, with 95 % intervals. Nothing else was measured."]
    if facts.command:
        command = _block(without_paths(facts.command), "bash")
        lines += ["", "Measured at the start and the end of", "", command]
    again = f"whet eval recipe.yaml checkpoint_path={facts.folder}"
    return "\n".join([*lines, "", f"`{again}` repeats it; recipe.yaml is the recipe below."])


def _share(accuracy: Mapping[str, float]) -> str:
    return f"{100 * accuracy['mean']:.1f} % [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]"


def _number(mean: Mapping[str, float]) -> str:
    return f"{mean['mean']:.3f} [{mean['low']:.3f}, {mean['high']:.3f}]"


def _data(config: Mapping[str, Any]) -> str:
    datasets = {name: (spec or {}).get("config") or {} for name, spec in (config["datasets"] or {}).items()}
    text = yaml.safe_dump(_map_texts(datasets), sort_keys=False, allow_unicode=True, width=110)
    how = "Problems that can be verified: tasks of whetstone, or rows of a file, with their settings."
    return f"## Data\n\n{how} No other text was trained on.\n\n{_block(text.rstrip(), 'yaml')}"


def _recipe(facts: CardFacts) -> str:
    text = yaml.safe_dump(recipe(facts.config), sort_keys=False, allow_unicode=True, width=110)
    head = "## Recipe\n\nEvery setting that is not a default; `whet train recipe.yaml` trains it again."
    return f"{head}\n\n{_block(text.rstrip(), 'yaml')}"


def _samples(samples: Sequence[Sample]) -> str:
    parts = ["## Samples\n\nThe first completion of fixed problems, chosen by position and not by quality."]
    for sample in samples:
        title = f"**{sample.kind}**" + (f", right answer: `{_plain(sample.gold)}`" if sample.gold else "")
        parts.append(f"{title}\n\n{_block(sample.question)}")
        parts += [f"Step {step}:\n\n{_block(text)}" for step, text in sample.completions]
    return "\n\n".join(parts)


def _limits(facts: CardFacts) -> list[str]:
    lines = []
    if facts.config:
        lines = [
            "It was trained and measured on the tasks above only. Whether other abilities of the base "
            "improved or were lost was not measured.",
            "It learned what its rewards pay. A reward can be earned without a sound derivation.",
        ]
    return [*lines, *facts.notes, "It was not examined for safety, bias or facts."]


def _usage(facts: CardFacts) -> str:
    name = facts.folder
    if facts.is_adapter:
        return _adapter_usage(facts.base, name)
    text = (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
        f"`vllm serve {name}` serves it."
    )
    files = ", ".join(f"`{file}`" for file in facts.gguf)
    return text + (f" llama.cpp loads {files}." if files else "")


def _adapter_usage(base: str, name: str) -> str:
    where = base if _HUB_NAME.fullmatch(base) else "BASE_MODEL_FOLDER"
    code = (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{where}", dtype="auto")\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n\n'
        "# A model of its own, which needs no peft. In float32: bf16 would round a small adapter away\n"
        "# (`whet export` writes one in bf16 that has not lost it).\n"
        'model.float().merge_and_unload().save_pretrained("merged")\n'
        f'AutoTokenizer.from_pretrained("{name}").save_pretrained("merged")\n'
    )
    text = (
        f"## Use\n\nThis folder holds an adapter, not a whole model.\n\n```python\n{code}```\n\n"
        f"vLLM does not take the adapter as a model. It takes the merged folder, or `vllm serve {where} "
        f"--enable-lora --lora-modules {name}=PATH_OF_THIS_FOLDER`."
    )
    pebble = f" `{where}` of pebble is what `whetstone.model.hub.resolve('pebble')` returns."
    return text + (pebble if base == PEBBLE else "")


def _map_texts(value: Any) -> Any:
    """Plain data with the folders of every path left out; texts with spaces are no paths."""
    if isinstance(value, Mapping):
        return {key: _map_texts(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(entry) for entry in value]
    return without_paths(value) if isinstance(value, str) and not re.search(r"\s", value) else value


def _plain(text: str | None) -> str:
    """One line without markup."""
    return re.sub(r"[`<>\[\]*|\n]", " ", escape_controls(cut(str(text), 100))).strip()


def _block(text: str, language: str = "text") -> str:
    """A code block that its text can't end."""
    text = escape_controls(cut(text, _MAX_SAMPLE) if language == "text" else text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
