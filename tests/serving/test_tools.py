"""Tools and adapters by name, with models that are trained here in a second or two."""

import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.serving import Running, serving
from whetstone.config import build
from whetstone.errors import UserError
from whetstone.model.policy import Policy, load_policy
from whetstone.model.sharded import model_writer
from whetstone.run.checkpoint import save_model
from whetstone.serving.models import ServedModel

CALL = '{"name": "add", "arguments": {"a": 4, "b": 73}}'
TEMPLATE = (
    "{% if tools %}<|system|>tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>"
    "{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
MESSAGES: list[Any] = [{"role": "user", "content": "4 + 73"}]


def teach(policy: Policy, prompt: str, answer: str, steps: int) -> None:
    """Gradient steps until the model writes `answer`."""
    ids = policy.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    new = policy.tokenizer(answer, add_special_tokens=False)["input_ids"]
    row = torch.tensor([[*ids, *new]])
    labels = row.clone()
    labels[:, : len(ids)] = -100
    policy.set_attention("sdpa")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        policy.model(input_ids=row, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.restore_attention()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The embedded model, taught to call a tool."""
    folder = tmp_path_factory.mktemp("caller") / "caller"
    policy = load_policy(build({}).model)
    policy.tokenizer.chat_template = TEMPLATE
    prompt = policy.tokenizer.apply_chat_template(
        MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert "tools: add" in prompt
    teach(policy, prompt, f"Let me add.<tool_call>{CALL}</tool_call><|end|>", 30)
    save_model(model_writer(policy), folder, 1)
    with serving(ServedModel.open(str(folder), max_length=512, max_sequences=4)) as server:
        yield server


def ask(caller: Running, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"model": "caller", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    return caller.client().chat.completions.create(**{**defaults, "max_tokens": 100, **settings})


def test_calls_of_tools_come_back(caller: Running) -> None:
    choice = ask(caller).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add") and call.id
    assert json.loads(call.function.arguments) == {"a": 4, "b": 73}
    assert (choice.message.content, choice.finish_reason) == ("Let me add.", "tool_calls")
    result = {"role": "tool", "tool_call_id": call.id, "content": "77"}
    again = ask(caller, messages=[*MESSAGES, choice.message.model_dump(), result], max_tokens=4)
    ids = caller.served.encode_chat([*MESSAGES, choice.message.model_dump(), result], TOOLS)
    text = caller.served.codec.chat.decode(ids, keep_special=True)
    assert f"Let me add.<tool_call>{CALL}</tool_call><|end|><|user|>77<|end|>" in text
    assert again.usage.prompt_tokens == len(ids)


def test_variables_of_the_template_are_taken_by_name(tmp_path: Path) -> None:
    policy = load_policy(build({}).model)
    policy.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ 'quick' if enable_thinking is false }}{{ reasoning_effort }}{% endif %}"
    )
    save_model(model_writer(policy), tmp_path / "thinker", 1)
    with serving(ServedModel.open(str(tmp_path / "thinker"), max_length=128)) as server:
        create: Any = server.client().chat.completions.create
        messages = [{"role": "user", "content": "1 + 1"}]

        def length(**settings: Any) -> int:
            return create(model="thinker", messages=messages, max_tokens=1, **settings).usage.prompt_tokens

        plain = length()
        assert length(reasoning_effort="high") == plain + 4
        assert length(extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == plain + 5
        for body, param, text in (
            (
                {"chat_template_kwargs": {"enable_thinkin": True}},
                "chat_template_kwargs",
                "did you mean 'enable_thinking'",
            ),
            (
                {"chat_template_kwargs": {"enable_thinking": "false"}},
                "chat_template_kwargs",
                "without quotes",
            ),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "sets messages"),
        ):
            with pytest.raises(openai.BadRequestError, match=text) as caught:
                length(extra_body=body)
            assert caught.value.param == param


def test_a_template_without_effort_refuses_it(caller: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="does not know") as caught:
        ask(caller, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


def test_streamed_calls_are_whole_and_not_in_the_text(caller: Running) -> None:
    deltas = [event.choices[0].delta for event in ask(caller, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Let me add."
    (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert calls[0].index == 0 and json.loads(calls[0].function.arguments) == {"a": 4, "b": 73}


def test_without_tools_a_call_is_text(caller: Running) -> None:
    plain = caller.served.encode_chat(MESSAGES, ())
    choice = ask(caller, tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert ask(caller, tool_choice="none", max_tokens=1).usage.prompt_tokens == len(plain)
    with pytest.raises(openai.BadRequestError, match="can't be forced"):
        ask(caller, tool_choice="required")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of different ranks on different layers."""
    folder, folders = tmp_path_factory.mktemp("adapters"), {}
    for number, (rank, targets) in enumerate(((4, "all-linear"), (2, ["q_proj", "down_proj"]))):
        settings = {"use_peft": True, "lora_r": rank, "lora_target_modules": targets}
        policy = load_policy(build(settings).model)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        save_model(model_writer(policy), folder / f"adapter{number}", 1)
        folders[f"adapter{number}"] = str(folder / f"adapter{number}")
    return folders


def test_adapters_share_a_batch(adapters: dict[str, str]) -> None:
    served = ServedModel.open("pebble", adapters=adapters, max_length=256, max_sequences=8)
    assert served.names == {"pebble": 0, "adapter0": 1, "adapter1": 2}
    folder = served.sampler.policy.lm.name_or_path
    prompt = served.sampler.encode_text("4 + 73 - 12 =")
    expected = {}
    for name in served.names:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        if name in adapters:
            model = PeftModel.from_pretrained(model, adapters[name])
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16,
                             do_sample=False, eos_token_id=[-1], pad_token_id=0)  # fmt: skip
        expected[name] = out[0, len(prompt) :].tolist()
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    with serving(served) as server:
        client = server.client()
        assert [model.id for model in client.models.list().data] == ["pebble", "adapter0", "adapter1"]

        def complete(name: str) -> list[int]:
            settings: dict[str, Any] = {"model": name, "prompt": list(prompt), "temperature": 0}
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer: Any = client.completions.create(**settings, max_tokens=16, extra_body=extra)
            return answer.choices[0].token_ids

        names = [*served.names] * 4
        with ThreadPoolExecutor(len(names)) as pool:
            for name, tokens in zip(names, pool.map(complete, names), strict=True):
                assert tokens == expected[name], name


def test_an_adapter_that_overflows_costs_nobody_else(adapters: dict[str, str], tmp_path: Path) -> None:
    """Four requests of it in a row beside a stream of the model itself; three failures end an engine."""
    folder = tmp_path / "broken"
    shutil.copytree(adapters["adapter0"], folder)
    (file,) = folder.glob("*.safetensors")
    save_file({name: torch.full_like(t, 1e30) for name, t in load_file(file).items()}, file)
    served = ServedModel.open("pebble", adapters={"broken": str(folder)}, max_length=256, max_sequences=8)
    settings: dict[str, Any] = {"prompt": "4 + 73 - 12 =", "seed": 1, "temperature": 1.0, "max_tokens": 128}
    extra = {"ignore_eos": True, "return_token_ids": True}
    with serving(served) as server:
        client = server.client()
        alone: Any = client.completions.create(model="pebble", **settings, extra_body=extra)
        stream: Any = client.completions.create(model="pebble", **settings, extra_body=extra, stream=True)
        ids = [*next(stream).choices[0].token_ids]
        for _ in range(4):
            with pytest.raises(openai.InternalServerError, match="computes no probabilities"):
                client.completions.create(model="broken", **settings, extra_body=extra)
        ids += [token for event in stream for choice in event.choices for token in choice.token_ids]
        assert ids == alone.choices[0].token_ids and len(ids) == 128
        assert server.backend.last_error is None
    save_file({name: torch.full_like(t, math.nan) for name, t in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"broken .* has NaN or infinite weights"):
        ServedModel.open("pebble", adapters={"broken": str(folder)})


def test_wrong_adapters(adapters: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name of the model"):
        ServedModel.open("pebble", adapters={"pebble": adapters["adapter0"]})
    with pytest.raises(UserError):
        ServedModel.open("pebble", adapters={"x": str(tmp_path / "nothing")})
