"""`whet export`: the folder computes what the run's model computed, in transformers, our engine and GGUF."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.exports import compare_rounded, engine_tokens, make_run, tiny_model, transformers_tokens
from whetstone.__main__ import run as whet
from whetstone.config import build
from whetstone.errors import UserError
from whetstone.export.folder import BOUNDS, export, logit_difference
from whetstone.model.hub import load_gguf, resolve
from whetstone.model.nf4 import dequantize, quantize
from whetstone.model.policy import load_policy
from whetstone.run.source import find_source

LORA = {"use_peft": True, "lora_r": 4}


def load_folder(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_greedy_tokens_are_those_of_the_run(settings: dict, tmp_path: Path) -> None:
    expected = engine_tokens(make_run(tmp_path / "run", **settings))
    exported = export(find_source(str(tmp_path / "run")), dtype="f32", gguf=["f16"])
    assert exported.folder == tmp_path / "run" / "export"
    model, tokenizer = load_folder(exported.folder)
    assert model.dtype == torch.float32 and not (exported.folder / "adapter_config.json").exists()
    assert transformers_tokens(model, tokenizer, expected) == expected
    ours = load_policy(build({"model_name_or_path": str(exported.folder)}).model)
    assert engine_tokens(ours) == expected
    if settings:  # the adapter itself, beside its base
        adapter = tmp_path / "run" / "final_model"
        with_base = PeftModel.from_pretrained(load_folder(Path(resolve("pebble")))[0], str(adapter))
        assert transformers_tokens(with_base, tokenizer, expected) == expected
        assert engine_tokens(load_policy(build({"model_name_or_path": str(adapter)}).model)) == expected
    (gguf,) = exported.folder.glob("*.gguf")
    compare_rounded(load_gguf(gguf), model, tokenizer, expected, gap=0.02)
    # The run's model differs from its base, so an export of the base would have failed.
    assert transformers_tokens(load_folder(Path(resolve("pebble")))[0], tokenizer, expected) != expected


@pytest.mark.parametrize("kind", ["use_dora", "load_in_4bit", "use_rslora"])
def test_merged_weights_compute_what_base_and_adapter_do(kind: str, tmp_path: Path) -> None:
    policy = make_run(tmp_path / "run", str(tiny_model(tmp_path / "base")), **LORA, **{kind: True})
    exported = export(find_source(str(tmp_path / "run")))
    model, tokenizer = load_folder(exported.folder)
    ids = torch.tensor([tokenizer("What is 4 + 73 - 12?\n<think>")["input_ids"]])
    policy.set_attention("sdpa")
    with torch.no_grad():
        together, merged = policy.model(ids).logits, model(ids).logits
        with policy.model.disable_adapter():
            base = policy.model(ids).logits
    assert logit_difference(merged, together).relative < 1e-5
    assert logit_difference(base, together).relative > 1e-2, "the adapter changes something"


def test_a_4_bit_base_of_a_gpu_was_in_bf16(tmp_path: Path) -> None:
    """The record of a run on a GPU, where the base is rounded to bf16 before it is quantized; by hand."""
    base = tiny_model(tmp_path / "base")
    make_run(tmp_path / "run", str(base), **LORA, load_in_4bit=True, bf16=True)
    session = {"command": "whet train", "machine": {"gpus": ["NVIDIA H100"]}}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"sessions": [session]}))
    source = find_source(str(tmp_path / "run"))
    assert source.was_4bit and source.was_bf16
    merged = load_folder(export(source).folder)[0].state_dict()
    name = "model.layers.1.mlp.up_proj"
    adapter = load_file(tmp_path / "run" / "final_model" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
    weight = load_folder(base)[0].state_dict()[f"{name}.weight"].bfloat16()
    rounded = dequantize(*quantize(weight), torch.bfloat16).float()
    scaling = build({}).model.lora_alpha / LORA["lora_r"]
    assert torch.allclose(merged[f"{name}.weight"], rounded + scaling * b @ a, atol=1e-6)
    assert (rounded - weight.float()).abs().max() > 1e-3


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    make_run(place / "sums", str(tiny_model(place / "base")), **LORA)
    return place / "sums"


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "BF16"), ("f16", "F16"), (None, "F32")])
def test_weights_have_the_precision_asked_for(
    dtype: str | None, stored: str, lora_run: Path, tmp_path: Path
) -> None:
    exported = export(find_source(str(lora_run)), tmp_path / "out", dtype=dtype)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == names[exported.dtype]
    files = {"README.md", "generation_config.json", "tokenizer.json", "chat_template.jinja", "whetstone.json"}
    assert files <= set(exported.files)
    for path in (tmp_path / "out").glob("*.*"):
        if path.suffix in (".json", ".md", ".jinja"):
            assert str(lora_run.parent) not in path.read_text(), path


def test_shards_load_as_one_file_does(lora_run: Path, tmp_path: Path) -> None:
    one = export(find_source(str(lora_run)), tmp_path / "one")
    many = export(find_source(str(lora_run / "final_model")), tmp_path / "many", max_shard_size="100KB")
    shards = [name for name in many.files if name.endswith(".safetensors")]
    assert len(shards) >= 3 and max(many.files[name] for name in shards) < 1.1e5
    first, second = load_folder(one.folder)[0].state_dict(), load_folder(many.folder)[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_export_replaces_its_own_folder_and_no_other(lora_run: Path, tmp_path: Path) -> None:
    source = find_source(str(lora_run))
    (tmp_path / "out").mkdir()
    export(source, tmp_path / "out", dtype="bf16")
    export(source, tmp_path / "out", dtype="f16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float16"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    for output in (mine, mine / "thesis.txt", lora_run / "final_model", lora_run):
        with pytest.raises(UserError, match="--output"):
            export(source, output)
    assert (mine / "thesis.txt").read_text() == "mine"
    with pytest.raises(UserError, match="--output"):
        export(find_source("pebble"))
    assert sorted(path.name for path in lora_run.iterdir()) == ["config.yaml", "final_model"]


@pytest.mark.parametrize("size", ["5", "GB", "0GB", "-1GB", "1e3MB", "9" * 400 + "GB"])
def test_a_shard_size_that_is_none_is_refused(size: str, lora_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--max-shard-size"):
        export(find_source(str(lora_run)), tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


def test_a_damaged_model_is_not_exported(lora_run: Path, tmp_path: Path) -> None:
    shutil.copytree(lora_run, tmp_path / "run")
    weights = tmp_path / "run" / "final_model" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match="damaged"):
        export(find_source(str(tmp_path / "run")))
    assert not (tmp_path / "run" / "export").exists()


def test_an_export_that_fails_leaves_nothing(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that no file meets: the failure comes after the GGUF file was written."""
    monkeypatch.setitem(BOUNDS, "q8_0", 0.0)
    with pytest.raises(UserError, match="other logits"):
        export(find_source(str(lora_run)), tmp_path / "out", gguf=["q8_0"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["run_name: x\n", "datasets: [1]\nlora_r: {}\n", "[", "datasets: {a: 1}"])
def test_damaged_files_of_a_run_leave_a_card_without_them(
    content: str, lora_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(lora_run, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(content)
    (tmp_path / "run" / "train_results.json").write_text('{"steps": 3, "accuracy_after": 1}')
    exported = export(find_source(str(tmp_path / "run")), tmp_path / "out")
    card = (exported.folder / "README.md").read_text()
    assert "## License" in card and "was not measured" in card


def test_what_a_name_means(lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = find_source(str(lora_run))
    assert (final.model, final.title, final.is_final) == (str(lora_run / "final_model"), "sums", True)
    monkeypatch.chdir(lora_run)
    here = find_source("final_model")
    assert here.run == lora_run and here.is_final and find_source(".").is_final
    assert find_source("pebble").run is None
    (tmp_path / "config.yaml").write_text("run_name: x\n")
    with pytest.raises(UserError, match="auto_resume"):
        find_source(str(tmp_path))


def test_the_command_prints_sizes_and_refuses_in_one_sentence(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert whet(["export", str(lora_run), "--output", str(out), "--dtype", "bf16", "--gguf", "q8_0"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert {row.split()[0] for row in rows} == {path.name for path in out.iterdir()}
    (gguf,) = (row for row in rows if "sums-q8_0.gguf" in row)
    assert 0 < float(gguf.split()[-1]) < 2
    assert whet(["export", str(tmp_path / "nothing")]) == 2
    assert whet(["export", "a" * 5000]) == 2
    assert whet(["export", str(lora_run), "--dtype", "int4"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_smollm2_answers_the_same_after_export(kind: str, tmp_path: Path) -> None:
    settings = {"lora_r": 8, "use_peft": True} if kind == "lora" else {}
    policy = make_run(tmp_path / "run", "smollm2-135m", 0.01, **settings)
    expected = engine_tokens(policy)
    exported = export(find_source(str(tmp_path / "run")), dtype="f32", gguf=["f16", "q8_0"])
    model, tokenizer = load_folder(exported.folder)
    assert transformers_tokens(model, tokenizer, expected) == expected
    compare_rounded(load_gguf(exported.folder / "run-f16.gguf"), model, tokenizer, expected, gap=0.1)
    assert exported.differences["run-f16.gguf"].relative < 2e-3
    assert exported.differences["run-q8_0.gguf"].relative < 5e-2
