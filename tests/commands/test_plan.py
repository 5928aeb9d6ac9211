"""`whet plan`: the numbers of the arithmetic, exit codes, and bad input."""

import json

import pytest

from tests.support.models import write_tiny
from whetstone.__main__ import run


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code = run(["plan", *words, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert code == int(not plan["fits"])
    return plan


def test_a_plan_for_a_named_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    plan = document(capsys, "six_tasks", "--gpu", "H200", "--price", "2", "--tokens", "200")
    assert plan["model"]["parameters"] == plan["model"]["trained"] == 1_543_714_304
    assert plan["batch"]["prompts_per_batch"] * plan["batch"]["num_generations"] == 256
    assert plan["fits"] and plan["micro_batch_tokens"] == 16384 and plan["checkpointed_layers"] == 0
    assert plan["peak_bytes"] == sum(plan["memory_bytes"]["update"].values())
    seconds = plan["seconds"]
    assert seconds["batch_s"] == pytest.approx(seconds["rollout_s"] + seconds["update_s"])
    assert plan["price"] == pytest.approx(2 * seconds["total_s"] / 3600)
    assert plan["energy_kwh"] == pytest.approx(0.75 * 0.7 * seconds["total_s"] / 3600)
    assert plan["fits_gpus"]["141"]["1"] == {} and plan["fits_gpus"]["16"]["1"]


def test_plan_beyond_memory_names_an_adapter_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "model_name_or_path=Qwen/Qwen2.5-7B-Instruct"
    plan = document(capsys, "six_tasks", model, "--gpu", "24")
    assert not plan["fits"] and plan["seconds"] is None
    change = plan["fits_gpus"]["24"]["1"]
    words = [f"{key}={str(value).lower()}" for key, value in change.items()]
    assert document(capsys, "six_tasks", model, "--gpu", "24", *words)["fits"]


def test_the_table_over_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is the plan of its settings on so many GPUs; on one, 16 bytes x 7.6 B need a change."""
    words = ["six_tasks", "model_name_or_path=Qwen/Qwen2.5-7B-Instruct", "prompts_per_step=8"]
    words += ["--gpu", "H100", "--tokens", "200"]
    table = document(capsys, *words, "--scale", "--gpus", "3")
    rows = {row["gpus"]: row for row in table["scale"]}
    assert [(gpus, row["fits"]) for gpus, row in rows.items()] == [
        (1, False),
        *((n, True) for n in (2, 3, 4, 8)),
    ]
    assert rows[1]["settings"]["optim"] == "adamw_8bit"
    for gpus, row in rows.items():
        settings = [f"{key}={value}" for key, value in row["settings"].items()]
        plan = document(capsys, *words, *settings, "--gpus", str(gpus))
        assert plan["fits"] and plan["peak_bytes"] == row["peak_bytes"] <= 80e9
        assert plan["seconds"]["batch_s"] == row["batch_s"] == row["rollout_s"] + row["update_s"]
        assert plan["batch"]["prompts_per_batch"] == table["batch"]["prompts_per_batch"] == 8
        assert row["tokens_per_s"] == pytest.approx(8 * 8 * 200 / row["batch_s"])
    # The layout that was chosen is the fastest of those that fit.
    for layout in ("tp_size=2", "ddp_size=2", "tp_size=4", "tp_size=2 ddp_size=2"):
        plan = document(capsys, *words, *layout.split(), "--gpus", "4")
        assert not plan["fits"] or plan["seconds"]["batch_s"] >= rows[4]["batch_s"]


def test_a_batch_stays_that_of_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise it grows with the ranks. Servers, and dropout in adapters, need whole layers."""
    words = ["quickstart", "prompts_per_step=null", "per_device_train_batch_size=8", "num_generations=8"]
    words += ["model_name_or_path=Qwen/Qwen2.5-32B-Instruct", "bf16=true", "--gpu", "H200", "--scale"]
    rows = document(capsys, *words)["scale"]
    assert rows[-1]["settings"]["tp_size"] > 1 and rows[-1]["settings"]["prompts_per_step"] == 1
    assert not rows[0]["fits"] and "prompts_per_step" not in rows[0]["settings"]
    for changed in (["rollout_engine=vllm", "vllm_mode=server"], ["use_peft=true", "lora_dropout=0.1"]):
        rows = document(capsys, *words, *changed)["scale"]
        assert rows[-1]["fits"] and all("tp_size" not in row["settings"] for row in rows)


def test_the_table_on_the_terminal_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "six_tasks", "--gpu", "H200", "--tokens", "200", "--scale"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [first] = [line for line in lines if line.split()[:2] == ["1", "yes"]]
    assert float(first.split()[3]) == pytest.approx(2.3, rel=0.2)  # as it was measured
    assert first.endswith("  none")
    large = ["model_name_or_path=meta-llama/Llama-3.1-70B", "max_completion_length=65536"]
    assert run(["plan", "six_tasks", "--gpu", "L4", "--scale", *large]) == 1
    assert "python -m benchmarks.cluster" in capsys.readouterr().out
    four_bits = document(
        capsys, "six_tasks", "--gpu", "H100", "--scale", "use_peft=true", "load_in_4bit=true"
    )
    assert [row["fits"] for row in four_bits["scale"]] == [True, False, False, False]


def test_this_machine_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "quickstart", "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "2.68 M parameters" in out and "KV cache" in out and "8 GPUs" in out


@pytest.mark.parametrize(
    "words",
    [
        ["quickstart", "--gpu", "Z9000"],
        ["quickstart", "--gpu", "H100", "--measure"],
        ["quickstart", "device=cpu", "--gpus", "4"],
        ["quickstart", "--gpus", "0"],
        ["quickstart", "--tokens", "few"],
        ["quickstart", "--scale", "--gpu", "80"],
        ["quickstart", "--scale", "--gpu", "H100", "--gpus", "9"],
        ["quickstart", "model_name_or_path=/nowhere/at/all"],
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("whet: ") and error.count("\n") == 1


def test_a_model_that_transformers_samples_is_named(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sampling takes as long as measured for such a model, 0.067 s for each token of all sequences."""
    write_tiny("qwen3_5_text", tmp_path)
    words = ["quickstart", f"model_name_or_path={tmp_path}", "--gpu", "H200"]
    seconds = {}
    for engine in ("native", "vllm"):
        assert run(["plan", *words, f"rollout_engine={engine}"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("by transformers' generate, about 4k tokens/s" in out) == (engine == "native")
        assert ("linear_attention layers" in out) == (engine == "native")
        seconds[engine] = document(capsys, *words, f"rollout_engine={engine}")["seconds"]["rollout_s"]
    assert seconds["native"] == pytest.approx(0.067 * 128, rel=0.1) and seconds["vllm"] < 2
