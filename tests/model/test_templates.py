"""What chat templates do, found by rendering: prompts, SFT tokens, calls, observations, thoughts, for each of
the behaviors in tests/corpora/chat_templates.py, against transformers and TRL.
"""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.corpora.chat_templates import ANSWER, BEHAVIORS, THOUGHT, Behavior
from tests.corpora.model_folders import PEBBLE
from whetstone.config import build
from whetstone.config.sections import ModelConfig
from whetstone.environments.calls import parse_calls
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.templates import ChatTemplate
from whetstone.rewards import matching
from whetstone.rewards.builtin import format_reward
from whetstone.tasks.scoring.worker import RewardWorker
from whetstone.types import Problem

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "description": "A number."},
                "s": {"type": "string", "description": "A text."},
            },
            "required": ["x"],
        },
    },
}
QUESTION = {"role": "user", "content": "Q?"}
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {"name": "add", "arguments": {"x": 41, "s": "a b"}}
SAID = {"role": "assistant", "content": "", "tool_calls": [{"id": "whetstone", "function": FUNCTION}]}
RESULT = {"role": "tool", "name": "add", "content": "42", "tool_call_id": "whetstone"}


def make_chat(behavior: Behavior, now: str | None = None, **options: Any) -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    tokenizer.add_special_tokens({"additional_special_tokens": behavior.tokens.split()})
    tokenizer.bos_token, tokenizer.eos_token = behavior.tokens.split()[0], behavior.eos
    tokenizer.chat_template = behavior.template
    return Chat(tokenizer, ModelConfig(model_name_or_path="pebble", **options), now)


def template_of(chat: Chat) -> ChatTemplate:
    assert chat.template is not None
    return chat.template


def problem(*messages: dict[str, Any], tools: tuple[Any, ...] = ()) -> Problem:
    return Problem(id="p", task="t", messages=messages or (QUESTION,), answer=None, tools=tools)


def shown(chat: Chat, ids: Any) -> str:
    return chat.decode(ids, keep_special=True)


@pytest.fixture(scope="module", params=BEHAVIORS, ids=lambda behavior: behavior.family)
def made(request) -> tuple[Behavior, Chat]:
    return request.param, make_chat(request.param)


def test_a_prompt_is_that_of_transformers(made):
    behavior, chat = made
    developer = {**SYSTEM, "role": "developer"}
    both = [SYSTEM, QUESTION] if behavior.roles else [{"role": "user", "content": "Be brief.\n\nQ?"}]
    expected = (
        ((QUESTION,), [QUESTION]),
        ((SYSTEM, QUESTION), both),
        ((developer, QUESTION), [developer, QUESTION] if "developer" in behavior.roles else both),
    )
    assert tuple(chat.template.roles) == behavior.roles
    for messages, written in expected:
        text = chat.tokenizer.apply_chat_template(written, tokenize=False, add_generation_prompt=True)
        assert chat.prompt(problem(*messages)) == text
        assert shown(chat, chat.encode(problem(*messages))) == text
    assert chat.template.opening(chat.prompt(problem())) == behavior.opens


def test_a_solution_is_trained_as_the_template_writes_it(made):
    behavior, chat = made
    for solution, text in ((ANSWER, behavior.answer), (THOUGHT, behavior.thought)):
        assert shown(chat, chat.encode_solution(problem(), solution)) == text
    if not chat.template.opening(chat.prompt(problem())):
        said = [QUESTION, {"role": "assistant", "content": ANSWER}]
        whole = chat.tokenizer.apply_chat_template(said, tokenize=False)
        assert whole.startswith((chat.prompt(problem()) + behavior.answer).removesuffix("<|endoftext|>"))


def test_the_tokens_of_sft_are_those_of_trl(made):
    """TRL's own preparation of prompt and completion. It goes on behind the end of the turn."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    behavior, chat = made
    rows = [
        {"prompt": [QUESTION], "completion": [{"role": "assistant", "content": solution}]}
        for solution in (ANSWER, THOUGHT)
    ]
    own = SimpleNamespace(chat_template=None, completion_only_loss=True)
    settings = trl.SFTConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, max_length=None)
    prepared = trl.SFTTrainer._prepare_dataset(
        own, Dataset.from_list(rows), chat.tokenizer, settings, False, None, "train"
    )
    prompt = list(chat.encode(problem()))
    same = []
    for solution, row in zip((ANSWER, THOUGHT), prepared, strict=True):
        ours = list(chat.encode_solution(problem(), solution))
        count = next(n for n, label in enumerate(row["labels"]) if label != -100)
        behind = row["input_ids"][len(prompt) + len(ours) :]
        sees_prompt = row["input_ids"][:count] == prompt
        same.append(sees_prompt and row["input_ids"][count:] == [*ours, *behind])
        if ours[-1] == chat.tokenizer.eos_token_id and not chat.close_turn():  # TRL trains no end at all
            same[-1] = sees_prompt and row["input_ids"][count:] == ours[:-1]
    assert all(same) == behavior.trl


def test_a_call_is_written_and_read_back(made, caplog):
    behavior, chat = made
    assert chat.template.describes_tools == behavior.describes
    prompt = problem(QUESTION, tools=(ADD,))
    if not behavior.call:
        assert not chat.template.call or not behavior.describes
        return
    said = chat.encode_solution(prompt, SAID)
    text = behavior.call if chat.close_turn() else behavior.call + behavior.eos
    assert shown(chat, said).endswith(text)
    assert parse_calls(chat.turn(chat.encode(prompt), said, keep_special=True), [ADD]) == [FUNCTION]
    assert "can't be read" not in caplog.text
    assert chat.call_hint == f"write it like {chat.template.call.replace('whetstoneresult', 'f')}"


def test_an_observation_is_that_of_the_conversation(made):
    behavior, chat = made
    result = shown(chat, chat.encode_observation([RESULT], 1000))
    assert result == behavior.result
    if behavior.call:
        whole = chat.tokenizer.apply_chat_template(
            [QUESTION, SAID, RESULT], tools=[ADD], tokenize=False, add_generation_prompt=True
        )
        call = behavior.call.partition("</think>")[2].strip() or behavior.call
        assert whole.endswith(call + result)


def test_format_earns_the_same_wherever_a_thought_begins(made):
    _, chat = made
    prompt, ids = chat.encode(problem()), chat.encode_solution(problem(), THOUGHT)
    assert format_reward(chat.turn(prompt, ids)) == 1.0
    assert matching.extract(chat.turn(prompt, ids), "numeric") == "5"
    assert parse_calls(chat.turn(prompt, ids, keep_special=True), [ADD]) == []


def test_a_truncated_thought_is_no_answer(made):
    _, chat = made
    prompt, ids = chat.encode(problem()), chat.encode_solution(problem(), THOUGHT)
    cut = next(n for n in range(len(ids)) if chat.decode(ids[:n]).endswith("2+3"))
    assert matching.extract(chat.turn(prompt, ids[:cut]), "numeric") is None
    assert matching.extract(chat.turn(prompt, ids[:cut]), "normalized") is None


def test_a_box_in_a_truncated_thought_is_not_paid():
    worker = RewardWorker(build({"datasets": {"chain_sum": {}}, "reward_funcs": ["accuracy", "format"]}))
    [task] = worker._tasks["train"].values()
    asked = task.problem(0)
    right = f"<answer>{asked.answer['answer']}</answer>"
    for text, truncated, accuracy in (
        (f"<think>a</think>{right}", True, 1.0),
        (f"<think>perhaps {right}", False, 1.0),
        (f"<think>perhaps {right}", True, 0.0),
    ):
        assert worker.score(asked, text, 9, truncated)[0]["correct"] == accuracy


FAMILIES = {behavior.family: behavior for behavior in BEHAVIORS}


def test_fields_of_a_solution_are_written():
    thinking = {"role": "assistant", "content": ANSWER, "reasoning_content": "2+3"}
    for family, text in {
        "Qwen 2.5": "<think>\n2+3\n</think>\n\nIt is 5.<|im_end|>",  # no field for it: as text
        "Qwen 3.5": "2+3\n</think>\n\nIt is 5.<|im_end|>",
        "gpt-oss": FAMILIES["gpt-oss"].thought.replace("<answer>5</answer>", ANSWER),
    }.items():
        chat = make_chat(FAMILIES[family])
        assert shown(chat, chat.encode_solution(problem(), thinking)) == text
    chat = make_chat(FAMILIES["DeepSeek R1 distills"])  # a template that writes no calls, arguments as JSON
    call = {"function": {**FUNCTION, "arguments": '{"x": 41, "s": "a b"}'}}
    said = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    text = shown(chat, chat.encode_solution(problem(tools=(ADD,)), said))
    assert text.startswith("\n</think>\n\nI add.\n<tool_call>") and text.endswith("</tool_call><E>")


@pytest.mark.parametrize("family", [b.family for b in BEHAVIORS if b.call])
@pytest.mark.parametrize("drops_text", [False, True])
def test_a_call_is_trained_also_beside_text(family, drops_text):
    behavior = FAMILIES[family]
    if drops_text:  # as the templates of Mistral and Llama 3 do
        template = re.sub(r"{{ (m\.content[^}]*) }}", "{{ '' if m.tool_calls else \\1 }}", behavior.template)
        behavior = replace(behavior, template=template)
    chat = make_chat(behavior)
    prompt = problem(tools=(ADD,))
    for content in ("I add.", "<think>\n2+3\n</think>\n\n"):
        if family.startswith("Llama 3.2") and not drops_text:
            continue  # it writes no mark between text and call
        ids = chat.encode_solution(prompt, {**SAID, "content": content})
        turn = chat.turn(chat.encode(prompt), ids, keep_special=True)
        assert parse_calls(turn, [ADD]) == [FUNCTION]
        assert ids[-1] in chat.special_ids
        if "think" in content:
            assert "2+3" in turn


def test_a_prefix_belongs_to_the_turn():
    chat = make_chat(FAMILIES["Qwen 2.5"], assistant_prefix="Well. <think>\n")
    prompt, solution = (
        chat.encode(problem()),
        chat.encode_solution(problem(), "Well. <think>\n2\n</think>\n5"),
    )
    assert shown(chat, solution) == "2\n</think>\n5<|im_end|>"
    assert chat.turn(prompt, solution) == "Well. <think>\n2\n</think>\n5"


def test_a_prompt_template_may_open_a_thought():
    config = ModelConfig(apply_chat_template=False, prompt_template="Q: {question} A: <think>")
    chat = Chat(AutoTokenizer.from_pretrained(PEBBLE), config)
    ids = chat.encode_solution(problem(), "2 + 3 = 5")
    assert chat.turn(chat.encode(problem()), ids) == "<think>2 + 3 = 5"


def test_the_developer_joins_the_system_message():
    chat = make_chat(FAMILIES["Qwen 2.5"])
    messages = chat.messages(problem(SYSTEM, {"role": "developer", "content": "Use metres."}, QUESTION))
    assert messages == [{"role": "system", "content": "Be brief.\n\nUse metres."}, QUESTION]


def test_the_date_stays_that_of_the_first_day():
    behavior = FAMILIES["Llama 3.1 to 3.3"]
    first = make_chat(behavior, "2026-01-31T23:59:58+00:00")
    assert template_of(first).writes_date and first.prompt(problem()).startswith(
        "Today is 31 January 2026.\n"
    )
    today = make_chat(behavior)
    assert today.prompt(problem()) == today.tokenizer.apply_chat_template(
        [QUESTION], tokenize=False, add_generation_prompt=True
    )
    assert not template_of(make_chat(FAMILIES["Qwen 3"])).writes_date


def test_what_the_template_does_not_know_is_refused():
    behavior = FAMILIES["Qwen 3.5"]
    chat = make_chat(behavior, chat_template_kwargs={"enable_thinking": False})
    assert chat.prompt(problem()).endswith("<think>\n\n</think>\n\n")
    for options, complaint in (
        ({"enable_thinkin": False}, "does not know: did you mean 'enable_thinking'?"),
        ({"documents": []}, "sets documents, which the chat template of pebble does not know: leave it out."),
        ({"enable_thinking": "false"}, "the text 'false', which counts as true: write it without quotes."),
        ({"tools": []}, "sets tools"),
        ({"bos_token": "x"}, "sets bos_token"),
        ({"strftime_now": "x"}, "sets strftime_now"),
    ):
        with pytest.raises(UserError, match=re.escape(complaint)):
            make_chat(behavior, chat_template_kwargs=options)


def test_a_form_that_nobody_reads_is_named(caplog):
    template = FAMILIES["Qwen 2.5"].template.replace("<tool_call>", "<<").replace("</tool_call>", ">>")
    chat = make_chat(replace(FAMILIES["Qwen 2.5"], template=template))
    with caplog.at_level(logging.WARNING, "whetstone"):
        chat.encode(problem(tools=(ADD,)))
        chat.encode(problem(tools=(ADD,)))
    [record] = caplog.records
    assert "writes a call as '<<" in record.message and "tool_call_format=code_block" in record.message
