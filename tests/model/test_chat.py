"""Prompts by chat templates: thinking on and off, several EOS tokens, no system role, no pad token."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.corpora.model_folders import PEBBLE
from tests.support.engines import collect
from whetstone.config.sections import ModelConfig
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.engines.native import NativeEngine
from whetstone.model.chat import Chat
from whetstone.model.policy import load_policy
from whetstone.types import Finish, Problem

# The generation prompt of Qwen3: an empty thought where thinking is off.
THINKING = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"})
PROBLEM = Problem(id="p", task="t", messages=MESSAGES, answer="4")


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<|assistant|>"),
        ({"enable_thinking": True}, "<|assistant|>"),
        ({"enable_thinking": False}, "<|assistant|><think>\n\n</think>\n\n"),
    ],
)
def test_chat_template_kwargs_reach_the_template(options, end):
    config = ModelConfig(model_name_or_path="pebble", chat_template=THINKING, chat_template_kwargs=options)
    chat = Chat(AutoTokenizer.from_pretrained(PEBBLE), config)
    assert chat.prompt(PROBLEM) == f"<|system|>Be brief.<|end|><|user|>What is 2 + 2?<|end|>{end}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(PEBBLE, tmp_path / "model", ignore=shutil.ignore_patterns("*.sha256", "manifest*"))


def edit(file: Path, **changes: object) -> None:
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def hf(policy):
    return HFEngine(policy, 2, None)


def native(policy):
    return NativeEngine(policy, max_slots=2)


@pytest.mark.parametrize("engine", [native, hf])
def test_every_eos_of_the_generation_config_ends_a_completion(folder, engine):
    config = ModelConfig(model_name_or_path=str(folder))
    policy = load_policy(config)
    prompt = Chat(policy.tokenizer, config).encode(PROBLEM)
    request = [Request(prompt_ids=prompt, seeds=(0,))]
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    before = collect(engine(policy), request, sampling)[0, 0]
    assert len(before.token_ids) > 3
    second = before.token_ids[2]  # a second EOS, such as Llama's <|eom_id|>
    edit(folder / "generation_config.json", eos_token_id=[5, second])
    policy = load_policy(config)
    assert set(policy.stop_token_ids) == {5, second}
    after = collect(engine(policy), request, sampling)[0, 0]
    assert after.token_ids == before.token_ids[: before.token_ids.index(second) + 1]
    assert after.finish is Finish.STOP


def test_a_tokenizer_without_a_pad_token_pads_with_eos(folder):
    edit(folder / "tokenizer_config.json", pad_token=None)
    policy = load_policy(ModelConfig(model_name_or_path=str(folder)))
    assert policy.tokenizer.pad_token_id == policy.tokenizer.eos_token_id == 5
    prompts = [(3, 7, 9), (3, 7, 9, 11, 12, 13)]  # padded to one length by generate
    requests = [Request(prompt_ids=prompt, seeds=(0,)) for prompt in prompts]
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    ours = collect(native(policy), requests, sampling)
    theirs = collect(hf(policy), requests, sampling)
    assert {key: value.token_ids for key, value in ours.items()} == {
        key: value.token_ids for key, value in theirs.items()
    }
