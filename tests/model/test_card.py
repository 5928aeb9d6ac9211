"""Model cards and the files of a saved model: what they say of the base, who may read them, and merging."""

import json
import os
import re
import shlex
import stat
from pathlib import Path

import pytest
import torch
import yaml

from whetstone.config import build, flatten, load
from whetstone.model.card import CardFacts, Sample, card_text, license_of, public_name, recipe, without_paths
from whetstone.model.hub import SMOLLM2_HUB, base_and_adapter, cache_folder, resolve
from whetstone.train import train

WORDS = shlex.split(
    "prompts_per_step=1 num_generations=2 max_steps=2 save_steps=1 max_completion_length=8 "
    "eval_num_samples=2 eval_greedy=false eval_num_examples_to_print=0 reward_workers=1 run_name=run "
    "use_peft=true lora_r=4 preflight=off "
    "learning_rate=1e-2 entropy_coef=0.1 "  # a gradient even where rewards do not differ
    "'datasets={chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}'"
)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lora")
    before = os.umask(0o027)  # the group may read, others may not
    try:
        train(load("quickstart", [*WORDS, f"output_dir={place}"]))
    finally:
        os.umask(before)
    return place / "run"


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_adapter_names_its_base_portably(lora_run: Path) -> None:
    for folder in (lora_run / "checkpoint-1", lora_run / "final_model"):
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        assert settings["base_model_name_or_path"] == "pebble"
        assert base_and_adapter(str(folder)) == (resolve("pebble"), str(folder))
        for path in folder.glob("*.*"):
            if path.suffix in (".json", ".md", ".jinja") and path.name != "whetstone.json":
                assert resolve("pebble") not in path.read_text(encoding="utf-8"), path


def test_the_card_says_what_was_measured(lora_run: Path) -> None:
    card = (lora_run / "final_model" / "README.md").read_text(encoding="utf-8")
    results = json.loads((lora_run / "train_results.json").read_text(encoding="utf-8"))
    assert front_matter(card)["library_name"] == "peft" and "base_model" not in front_matter(card)
    assert "[More Information Needed]" not in card and "Model Card for Model ID" not in card
    assert f"{100 * results['accuracy_before']['mean']:.1f} %" in card and "2 fixed problems" in card
    assert "chain_sum" in card and "rank 4" in card and str(lora_run.parent) not in card
    written = yaml.safe_load(card.split("```yaml\n")[2].split("```")[0])
    assert written["learning_rate"] == 0.01 and written["model_name_or_path"] == "pebble"
    assert "output_dir" not in written and front_matter(card)["license"] == "apache-2.0"
    again = flatten(build(written))
    ours = {key: value for key, value in flatten(load("quickstart", WORDS).config).items() if key in written}
    assert {key: again[key] for key in ours} == ours
    early = (lora_run / "checkpoint-1" / "README.md").read_text(encoding="utf-8")
    assert "not measured" in early and "Model Card for Model ID" not in early


def test_the_code_of_the_card_merges_the_adapter(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = lora_run / "final_model"
    code = re.search(r"```python\n(.*?)```", (adapter / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    (tmp_path / "final_model").symlink_to(adapter)
    monkeypatch.chdir(tmp_path)
    exec(code[1].replace("BASE_MODEL_FOLDER", resolve("pebble")), {})
    ids = AutoTokenizer.from_pretrained("merged")("2 + 2", return_tensors="pt")
    base = AutoModelForCausalLM.from_pretrained(resolve("pebble"))
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained("merged")(**ids).logits
        plain = base(**ids).logits.clone()
        adapted = PeftModel.from_pretrained(base, str(adapter))(**ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
    assert (adapted - plain).abs().max() > 1e-3, "the adapter was trained"


def test_files_can_be_read_by_whom_the_umask_allows(lora_run: Path) -> None:
    folders = [lora_run / "checkpoint-1", lora_run / "checkpoint-2", lora_run / "final_model"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("smollm2-135m", SMOLLM2_HUB),
        (str(cache_folder() / "smollm2-135m"), SMOLLM2_HUB),
        ("/home/a/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de", "Qwen/Qwen3-0.6B"),
        ("checkpoints/sft", "checkpoints/sft"),
    ],
)
def test_the_public_name_of_a_base(base: str, name: str) -> None:
    assert public_name(base) == name


def facts(**changes) -> CardFacts:
    config = {"run_name": "sums", "datasets": {"chain_sum": {}}, "reward_funcs": ["/home/a/mine.py:f"]}
    named = {"title": "sums", "folder": "final_model", "is_adapter": False, "license": None, "step": 3}
    base = {"base": "Qwen/Qwen3-0.6B", "config": config, "results": {"steps": 3}}
    return CardFacts(**{**named, **base, **changes})


def test_the_card_of_a_whole_model() -> None:
    text = card_text(facts())
    assert front_matter(text)["base_model"] == "Qwen/Qwen3-0.6B" and "license" not in front_matter(text)
    assert "no evaluation" in text and "not stated" in text and "/home" not in text and "mine.py:f" in text
    local = card_text(facts(base="/home/a/models/sft"))
    assert "base_model" not in front_matter(local) and "/home" not in local and "sft" in local


def test_text_of_a_model_stays_in_its_block() -> None:
    """Fences, headings, HTML, front matter and control characters in samples and names are text only."""
    hostile = "```\n# owned\n<script>x</script>\n---\nlicense: mine\n---\n````\x1b[2J\u202e"
    sample = Sample(
        kind="wrong, then right", question=hostile, gold="`<b>", completions=[(0, hostile), (3, "2")]
    )
    text = card_text(facts(samples=[sample], title="<img src=x>\n# owned"))
    assert front_matter(text) == front_matter(card_text(facts())) and "\x1b" not in text
    outside, fence = [], ""
    for line in text.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = line.rstrip("abcdefghijklmnopqrstuvwxyz")
        else:
            outside.append(line)
    assert not fence
    assert not [line for line in outside if "owned" in line and line != "# img src=x  # owned"]
    assert not [line for line in outside if "<" in line]


def test_the_license_of_a_base(tmp_path: Path) -> None:
    assert license_of("smollm2-135m") == license_of(resolve("pebble")) == "apache-2.0"
    assert license_of(str(tmp_path)) is None
    for text, license in (
        ("---\nlicense: mit\n---\n# A model\n", "mit"),
        ("# A model\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\nlicense: 'x\n# y'\n---\n", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert license_of(str(tmp_path)) == license


def test_paths_of_this_machine_are_left_out() -> None:
    assert without_paths("whet train quickstart output_dir=/tmp/a/b x=../c.yaml") == (
        "whet train quickstart output_dir=b x=c.yaml"
    )
    assert without_paths("model=Qwen/Qwen3 '{path: /data/rows.json}' </think>") == (
        "model=Qwen/Qwen3 '{path: rows.json}' </think>"
    )
    config = {
        "model_name_or_path": "pebble",
        "developer_prompt": "a </think> /b",
        "reward_funcs": ["/h/m.py:f"],
    }
    assert recipe(config) == {**config, "reward_funcs": ["m.py:f"]}
