"""Model folders from anywhere (tests/corpora/model_folders.py): loaded, or refused in one sentence. And chat
templates, which are programs.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests.corpora.model_folders import MODELS, PEBBLE, PROOF, make
from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model import loading, templates
from whetstone.model.chat import Chat
from whetstone.model.hub import base_and_adapter
from whetstone.model.manifest import write_manifest
from whetstone.model.policy import load_policy
from whetstone.types import Problem

# Three seconds of CPU time until its limit ends it.
SLOW = ("template that loops",)
TEMPLATES = [name for name in MODELS if name.startswith("template")]


def outcome(room):
    """The exit code that `whet train` ends with, and the sentence."""
    try:
        Chat(load_policy(room).tokenizer, room)
        return 0, ""
    except UserError as error:
        return 2, str(error)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TEMPLATES])
def test_a_broken_folder_is_refused_in_one_sentence(tmp_path, name, monkeypatch):
    monkeypatch.setattr(loading, "TOKENIZER_S", 1.0)
    make(tmp_path / "model", name)
    code, result = outcome(ModelConfig(model_name_or_path=str(tmp_path / "model")))
    assert code == MODELS[name].exit_code, result
    if code:
        assert "\n" not in result and "\x1b" not in result and len(result) < 800
        assert "Traceback" not in result and (str(tmp_path) in result or "fetch it again" in result)
    assert not (tmp_path / "model" / PROOF).exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TEMPLATES]
)
def test_a_template_is_refused_or_rendered(tmp_path, name):
    from transformers import AutoTokenizer

    make(tmp_path / "model", name)
    room = ModelConfig(model_name_or_path=str(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"})
    problem = Problem(id="p", task="t", messages=messages, answer="4")
    if MODELS[name].exit_code:
        with pytest.raises(UserError, match=re.escape(str(tmp_path / "model"))):
            Chat(tokenizer, room)
    else:  # the system message is part of the user's
        text = Chat(tokenizer, room).prompt(problem)
        assert "Be brief.\n\nWhat is 2 + 2?" in text and "system" not in text


def test_a_template_that_takes_a_system_message_gets_it():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    template = templates.chat_template(tokenizer, "pebble", {})
    assert "system" in template.roles
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    ours = template.render(messages)
    assert ours == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_rendering_that_never_ends_is_stopped(monkeypatch):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(templates, "RENDER_S", 0.2)
    trial = "{% else %}{{ messages[0].content }}{% endif %}"
    tokenizer.chat_template = "{% if messages[0].content == '?' %}" + tokenizer.chat_template + trial
    with pytest.raises(UserError, match=r"0\.2 s"):
        templates.chat_template(tokenizer, "m", {}).render([{"role": "user", "content": "?"}])


HOSTILE = {
    "a power without end": "{% set n = messages[-1].content|length %}{{ (n ** (n ** n)) % 7 }}",
    "too much memory": "{{ ('a' * (messages|length * 6000000000))|length }}",
    "too much text": "{{ 'a' * 30000000 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_behaves_in_its_trial_is_stopped_later(name, monkeypatch):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    plain = "{{ messages[-1].content }}"
    tokenizer.chat_template = (
        f"{{% if messages[-1].content|length < 20 %}}{plain}{{% else %}}{HOSTILE[name]}{{% endif %}}"
    )
    template = templates.chat_template(tokenizer, "m", {})
    assert not template.roles
    monkeypatch.setattr(templates, "RENDER_S", 0.5)
    with pytest.raises(UserError, match="The chat template of m"):
        template.render([{"role": "user", "content": "What is two and two?"}])
    assert template.render([{"role": "user", "content": "2 + 2"}]) == "2 + 2"  # a new process


def test_no_template_knows_the_question_of_its_trial():
    code = "from whetstone.model.templates import QUESTION; print(QUESTION, end='')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert len({other, templates.QUESTION, templates.SYSTEM}) == 3 and len(other) == 16


def test_a_folder_that_we_wrote_is_compared_with_its_checksums(tmp_path):
    shutil.copytree(PEBBLE, tmp_path / "final_model")
    write_manifest(tmp_path / "final_model", step=3)
    room = ModelConfig(model_name_or_path=str(tmp_path / "final_model"))
    load_policy(room)
    path = tmp_path / "final_model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1  # a weight: nothing else would notice
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"model\.safetensors.*whetstone\.json"):
        load_policy(room)
    (tmp_path / "final_model" / "whetstone.json").unlink()
    load_policy(room)  # changed on purpose


def test_an_adapter_on_an_adapter_is_refused(tmp_path):
    for name, base in (("one", "two"), ("two", "one")):
        (tmp_path / name).mkdir()
        about = {"base_model_name_or_path": str(tmp_path / base)}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(about))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "two"))):
        base_and_adapter(str(tmp_path / "one"))


def test_the_adapters_settings_are_written_in_one_order(tmp_path):
    from whetstone.model.sharded import model_writer

    policy = load_policy(ModelConfig(use_peft=True, lora_r=2))
    model_writer(policy)(tmp_path)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets) and len(targets) == 7
    # And read back bit for bit.
    again = load_policy(ModelConfig(use_peft=True, lora_r=2), tmp_path)
    for one, other in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
