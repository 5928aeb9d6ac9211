"""Observations behind what the policy said, by the chat templates of eight families of models.

The expected texts are written by hand from the templates. The tokenizer is the embedded model's with the
special tokens of each family.
"""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from tests.corpora.model_folders import PEBBLE
from whetstone.config.sections import ModelConfig
from whetstone.model.chat import Chat
from whetstone.types import Problem

TRL = importlib.util.find_spec("trl")
OURS = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
USER = {"role": "user", "content": "Higher."}
RESULT = {"role": "tool", "name": "add", "content": "42"}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add to the counter.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "How much."}},
            "required": ["number"],
        },
    },
}
CHATML_USER = "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
CHATML_TOOL = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
CHATML_TOKENS = "<|endoftext|> <|im_start|> <|im_end|>"
MISTRAL_TOKENS = (
    "<s> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]"
)
HARMONY_TOKENS = "<|startoftext|> <|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|constrain|>"
LLAMA_END = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_USER = f"<|start_header_id|>user<|end_header_id|>\n\nHigher.{LLAMA_END}"
LLAMA_TOKENS = "<|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>"
GEMMA_USER = "\n<start_of_turn>user\nHigher.<end_of_turn>\n<start_of_turn>model\n"
GEMMA_TOOL = GEMMA_USER.replace("Higher.", "<tool_response>\n42\n</tool_response>")


class Family(NamedTuple):
    file: str
    tokens: str  # special ones; the first begins a text
    eos: str
    user: str  # behind the end of a turn
    tool: str
    describes_tools: bool = True
    said: str = "I say 5."  # a turn as the model samples it, without its end


FAMILIES = {
    "qwen2.5": Family("trl:qwen2_5", CHATML_TOKENS, "<|im_end|>", CHATML_USER, CHATML_TOOL),
    "qwen3": Family("trl:qwen3", CHATML_TOKENS, "<|im_end|>", CHATML_USER, CHATML_TOOL),
    "llama3": Family(
        "trl:llama3", LLAMA_TOKENS, "<|eot_id|>", LLAMA_USER,
        LLAMA_USER.replace("Higher.", "<tool_response>\n42\n</tool_response>"), describes_tools=False,
    ),
    "llama3.1": Family(
        "trl:llama3_1", LLAMA_TOKENS, "<|eot_id|>", LLAMA_USER,
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"42"{LLAMA_END}',
    ),
    "gemma": Family(
        "trl:gemma", "<bos> <start_of_turn> <end_of_turn>", "<end_of_turn>", GEMMA_USER, GEMMA_TOOL,
        describes_tools=False,
    ),
    "gemma3": Family(
        "trl:gemma3", "<bos> <start_of_turn> <end_of_turn>", "<end_of_turn>", GEMMA_USER, GEMMA_TOOL,
        describes_tools=False,
    ),
    "mistral": Family(
        "mistralai-Mistral-Nemo-Instruct-2407",
        MISTRAL_TOKENS, "</s>", "[INST]Higher.[/INST]",
        '[TOOL_RESULTS]{"content": 42, "call_id": "whetstone"}[/TOOL_RESULTS]',
    ),
    "smollm3": Family(
        "HuggingFaceTB-SmolLM3-3B", "<|begin_of_text|> <|im_start|> <|im_end|>", "<|im_end|>", CHATML_USER,
        CHATML_TOOL, describes_tools=False,
    ),
    "gpt-oss": Family(
        "trl:gptoss",
        HARMONY_TOKENS, "<|return|>",
        "<|start|>user<|message|>Higher.<|end|><|start|>assistant",
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant',
        said="<|channel|>final<|message|>I say 5.",
    ),
}  # fmt: skip


def make_chat(family: Family, **options: Any) -> Chat:
    source, _, name = family.file.rpartition(":")
    if source and TRL is None:
        pytest.skip("needs the templates in trl")
    folder = Path(str(TRL.origin)).parent / "chat_templates" if source and TRL else OURS
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    tokenizer.add_special_tokens({"additional_special_tokens": family.tokens.split()})
    tokenizer.bos_token, tokenizer.eos_token = family.tokens.split()[0], family.eos
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    return Chat(tokenizer, ModelConfig(model_name_or_path="pebble", **options))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> tuple[Family, Chat]:
    return FAMILIES[request.param], make_chat(FAMILIES[request.param])


def test_observations_are_what_the_template_writes(family):
    expected, chat = family
    assert chat.decode(chat.encode_observation([USER], 1000), keep_special=True) == expected.user
    assert chat.decode(chat.encode_observation([RESULT], 1000), keep_special=True) == expected.tool


def test_the_tokens_of_all_turns_are_those_of_the_conversation(family):
    expected, chat = family
    question = {"role": "user", "content": "Guess."}
    problem = Problem(id="p", task="t", messages=(question,), answer=None)
    said = chat.tokenizer(expected.said + expected.eos, add_special_tokens=False)["input_ids"]
    ids = [*chat.encode(problem), *said, *chat.encode_observation([USER], 1000)]
    conversation = [question, {"role": "assistant", "content": "I say 5."}, USER]
    text = chat.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    # gpt-oss renders the end of an earlier turn as <|end|>; the policy keeps the <|return|> that it sampled.
    assert chat.decode(ids, keep_special=True).replace("<|return|>", "<|end|>") == text


def test_several_results_follow_each_other(family):
    _, chat = family
    text = chat.decode(chat.encode_observation([RESULT, {**RESULT, "content": "43"}], 1000))
    assert text.index("42") < text.index("43")


def test_a_history_has_its_calls_and_results(family):
    """Written by the template, or as text where it has no way: as observations are."""
    expected, chat = family
    call = {"id": "whetstone", "type": "function", "function": {"name": "add", "arguments": {"number": 5}}}
    question = {"role": "user", "content": "Guess."}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {**RESULT, "tool_call_id": "whetstone"}
    messages = (question, said, result, {**result, "content": "43"})
    prompt = chat.prompt(Problem(id="p", task="t", messages=messages, answer=None, tools=(SCHEMA,)))
    assert prompt.rindex("Guess.") < prompt.rindex("number") < prompt.rindex("42") < prompt.rindex("43")
    if not expected.describes_tools:
        start = chat.encode(Problem(id="p", task="t", messages=(question,), answer=None, tools=(SCHEMA,)))
        text = '<tool_call>\n{"name": "add", "arguments": {"number": 5}}\n</tool_call>' + expected.eos
        turn = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        observation = chat.encode_observation(list(messages[2:]), 1000)
        assert prompt == chat.decode([*start, *turn, *observation], keep_special=True)


def test_every_prompt_describes_the_tools(family):
    expected, chat = family
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."})
    prompt = chat.prompt(Problem(id="p", task="t", messages=messages, answer=None, tools=(SCHEMA,)))
    assert "Add to the counter." in prompt and "Be brief." in prompt and "Guess." in prompt
    assert chat._describes_tools == expected.describes_tools
    assert ("within <tool_call></tool_call> XML tags:\n" in prompt) == (
        not expected.describes_tools or expected.file.startswith("trl:qwen")
    )


def test_the_fallback_is_the_text_of_qwens_template():
    plain, qwen = make_chat(FAMILIES["smollm3"]), make_chat(FAMILIES["qwen2.5"])
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."})
    problem = Problem(id="p", task="t", messages=messages, answer=None, tools=(SCHEMA,))
    text = plain.messages(problem)[0]["content"]
    assert qwen.prompt(problem).startswith(f"<|im_start|>system\n{text}<|im_end|>\n")


def test_thoughts_that_the_template_would_drop_are_kept():
    chat = make_chat(FAMILIES["qwen3"])
    said = "<think>\nFour or six.\n</think>\n\nI say 5."
    question = {"role": "user", "content": "Guess."}
    conversation = [question, {"role": "assistant", "content": said}, USER]
    rewritten = chat.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert "Four or six." not in rewritten
    problem = Problem(id="p", task="t", messages=(question,), answer=None)
    ids = [
        *chat.encode(problem),
        *chat.tokenizer(said + "<|im_end|>", add_special_tokens=False)["input_ids"],
        *chat.encode_observation([USER], 1000),
    ]
    assert chat.decode(ids, keep_special=True) == rewritten.replace("I say 5.", said)


def test_options_of_the_template_hold_behind_an_observation():
    chat = make_chat(FAMILIES["qwen3"], chat_template_kwargs={"enable_thinking": False})
    text = chat.decode(chat.encode_observation([USER], 1000), keep_special=True)
    assert text == CHATML_USER + "<think>\n\n</think>\n\n"


def test_a_long_observation_loses_its_middle():
    chat = make_chat(FAMILIES["qwen2.5"])
    ids = chat.encode_observation([{"role": "user", "content": "x y " * 500}], 100)
    text = chat.decode(ids, keep_special=True)
    assert len(ids) == 100
    assert text.startswith("\n<|im_start|>user\nx y") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
