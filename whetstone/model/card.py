"""The README.md (model card) of a saved model: what was trained from what, what was measured, how to load it.

No path of this machine is written where a public name is known.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from whetstone import __version__
from whetstone.model.hub import PEBBLE, SMOLLM2, SMOLLM2_HUB, cache_folder
from whetstone.model.manifest import CARD

ADAPTER_CONFIG = "adapter_config.json"
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What a card tells of a run's configuration.
_KEYS = (
    "reward_funcs", "reward_weights", "loss_type", "advantage", "beta", "learning_rate", "num_generations",
    "temperature", "max_completion_length", "seed",
)  # fmt: skip


def public_name(base: str) -> str:
    """The name by which a base model is known elsewhere: an alias or a hub name; a folder stays a folder."""
    if base == str(Path(__file__).resolve().parent / "pebble"):
        return PEBBLE
    if base in (SMOLLM2, str(cache_folder() / SMOLLM2)):
        return SMOLLM2_HUB
    snapshot = _SNAPSHOT.search(base)
    return f"{snapshot[1]}/{snapshot[2]}" if snapshot else base


def finish_adapter(folder: Path) -> None:
    """Name the base of a saved adapter publicly, sort what peft does not, and replace peft's empty card."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    settings = json.loads(path.read_text(encoding="utf-8"))
    # peft writes the names of modules in the order of a set, which differs from process to process.
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"] = sorted(settings["target_modules"])
    base = settings["base_model_name_or_path"] = public_name(str(settings["base_model_name_or_path"]))
    path.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    title = f"# LoRA adapter of {shown_name(base)}"
    text = "A checkpoint of a reinforcement learning run with whetstone. Its accuracy was not measured."
    card = [_front_matter(base, lora=True), title, text, _usage(base, lora=True)]
    (folder / CARD).write_text("\n\n".join(card), encoding="utf-8")


def write_final_card(run: Path, results: Mapping[str, Any]) -> None:
    """The card of `final_model` in a run folder: the recipe, and accuracy before and after."""
    folder = run / "final_model"
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    settings = folder / ADAPTER_CONFIG
    lora = settings.is_file()
    if lora:
        base = str(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"])
    else:
        base = public_name(str(config["model_name_or_path"]))
    (folder / CARD).write_text(final_card(config, results, base=base, lora=lora), encoding="utf-8")


def final_card(config: Mapping[str, Any], results: Mapping[str, Any], *, base: str, lora: bool) -> str:
    """The text of it."""
    tasks = ", ".join(config.get("datasets") or {})
    how = f"LoRA, rank {config['lora_r']}" if lora else "all weights"
    recipe = "\n".join(f"| `{key}` | {_value(config[key])} |" for key in _KEYS if config.get(key) is not None)
    sections = [
        _front_matter(base, lora=lora),
        f"# {config.get('run_name') or 'final_model'}",
        f"{shown_name(base)}, trained by reinforcement learning with verifiable rewards on {tasks} "
        f"({how}, {results['steps']:,} steps, whetstone {__version__}).",
        "## Measured\n\n" + _measured(results),
        _usage(base, lora=lora),
        f"## Recipe\n\n| key | value |\n|---|---|\n{recipe}\n",
    ]
    return "\n\n".join(sections)


def shown_name(base: str) -> str:
    """A base model in a sentence: of a folder its name only."""
    if base == PEBBLE:
        return "pebble (the model inside the package whetstone)"
    return base if _HUB_NAME.fullmatch(base) else f"a model in a local folder ({Path(base).name})"


def _front_matter(base: str, *, lora: bool) -> str:
    lines = [f"library_name: {'peft' if lora else 'transformers'}", "pipeline_tag: text-generation"]
    if _HUB_NAME.fullmatch(base):
        lines.insert(0, f"base_model: {base}")
    lines.append("tags: [reinforcement-learning, whetstone" + (", lora]" if lora else "]"))
    return "\n".join(["---", *lines, "---"])


def _measured(results: Mapping[str, Any]) -> str:
    if "accuracy_after" not in results:
        return "Nothing: the run had no evaluation."
    rows = ["| | before | after |", "|---|---|---|"]
    sampled = f"accuracy at temperature {results['eval_temperature']:g}"
    for name, key in ((sampled, "accuracy"), ("greedy accuracy", "greedy")):
        before, after = results[f"{key}_before"], results[f"{key}_after"]
        if before and after:
            rows.append(f"| {name} | {_share(before)} | {_share(after)} |")
    num = f"{results['accuracy_after']['num_problems']:,} fixed problems that it was not trained on"
    return "\n".join([*rows, "", f"On {num}, with 95 % intervals. Nothing else was measured."])


def _share(accuracy: Mapping[str, float]) -> str:
    return f"{100 * accuracy['mean']:.1f} % [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]"


def _usage(base: str, *, lora: bool) -> str:
    if not lora:
        return (
            "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'model = AutoModelForCausalLM.from_pretrained("final_model")\n'
            'tokenizer = AutoTokenizer.from_pretrained("final_model")\n```\n\n'
            "`vllm serve final_model` serves it."
        )
    where = base if _HUB_NAME.fullmatch(base) else "BASE_MODEL_FOLDER"
    code = (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{where}", dtype="auto")\n'
        'model = PeftModel.from_pretrained(base, "final_model")\n\n'
        "# A model of its own, which needs no peft:\n"
        'model.merge_and_unload().save_pretrained("merged")\n'
        'AutoTokenizer.from_pretrained("final_model").save_pretrained("merged")\n'
    )
    text = (
        f"## Use\n\nThis folder holds an adapter, not a whole model.\n\n```python\n{code}```\n\n"
        f"vLLM does not take the adapter as a model. It takes the merged folder, or `vllm serve {where} "
        "--enable-lora --lora-modules final_model=PATH_OF_THIS_FOLDER`."
    )
    pebble = f" `{where}` of pebble is what `whetstone.model.hub.resolve('pebble')` returns."
    return text + (pebble if base == PEBBLE else "")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value).rpartition("/")[2] if isinstance(value, str) else str(value)
