"""`whet plan`: the numbers of the arithmetic, exit codes, and bad input."""

import json

import pytest

from tests.support.models import write_tiny
from whetstone.__main__ import run
from whetstone.config import load


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


def test_what_does_not_fit_ends_with_1_and_an_adapter_that_does_with_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "model_name_or_path=Qwen/Qwen2.5-7B-Instruct"
    plan = document(capsys, "six_tasks", model, "--gpu", "24")
    assert not plan["fits"] and plan["seconds"] is None
    change = plan["fits_gpus"]["24"]["1"]
    words = [f"{key}={str(value).lower()}" for key, value in change.items()]
    assert document(capsys, "six_tasks", model, "--gpu", "24", *words)["fits"]


def test_the_table_over_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["six_tasks", "model_name_or_path=Qwen/Qwen2.5-7B-Instruct", "prompts_per_step=8"]
    plan = document(capsys, *words, "--gpu", "H100", "--tokens", "200", "--scale", "--gpus", "4")
    rows = {row["gpus"]: row for row in plan["scale"]["rows"]}
    assert list(rows) == [1, 4, 8, 16, 64, 256, 1024, 4096]
    assert plan["fits"] and rows[1]["better"] is rows[1]["synchronous"] is rows[1]["one_step_off"] is None
    assert plan["scale"]["most_useful_gpus"] in rows
    for gpus, row in rows.items():
        for name in ("synchronous", "one_step_off"):
            if row[name] is None:
                continue
            option = row[name]
            servers = option["servers"] * max(1, option["server_tensor_parallel_size"])
            assert option["ranks"] + servers == gpus
            assert option["replicas"] * option["shards"] * option["tp_size"] == option["ranks"]
            assert option["tokens_per_s_and_gpu"] == pytest.approx(option["tokens_per_s"] / gpus)
            assert load("six_tasks", [f"{key}={value}" for key, value in option["settings"].items()])
        if row["one_step_off"] is not None:
            assert row["one_step_off"]["settings"]["async_rollouts"] == 1
            assert row["one_step_off"]["step_s"] < row["one_step_off"]["synchronous_step_s"]
    paying = [gpus for gpus, row in rows.items() if row["better"] == "one_step_off"]
    assert plan["scale"]["one_step_off_pays"] == paying
    assert set(paying) <= set(plan["scale"]["one_step_off_pays_with_fast_servers"]) <= set(rows)


def test_the_table_on_the_terminal_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "six_tasks", "--gpu", "H200", "--tokens", "200", "--scale"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [first] = [line for line in lines if line.split()[:2] == ["1", "1x1x1"]]
    assert float(first.split()[3].rstrip("*")) == pytest.approx(2.3, rel=0.2)  # as it was measured
    large = ["model_name_or_path=meta-llama/Llama-3.1-70B", "max_completion_length=65536"]
    assert run(["plan", "six_tasks", "--gpu", "L4", "--scale", *large]) == 1


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
        ["six_tasks", "--scale", "--gpu", "H100", "loss_type=sft"],
        ["six_tasks", "--scale", "--gpu", "H100", "use_peft=true", "load_in_4bit=true"],
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
