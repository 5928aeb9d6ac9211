"""Sampling from a run, a checkpoint or a model: the tokens of transformers' generate, whole or streamed."""

import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from whetstone.config import build, dump
from whetstone.endpoint.text_stream import StopTexts, TextStream
from whetstone.errors import UserError
from whetstone.inference.conversation import Conversation
from whetstone.inference.sampler import Sampler
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer
from whetstone.run.checkpoint import save_model
from whetstone.run.source import find_source
from whetstone.types import Finish

QUESTION = "State the final answer to the following arithmetic problem: 4 + 73 - 12 ="
SYSTEM = "You are a careful calculator."


@pytest.fixture(scope="module")
def pebble() -> Sampler:
    return Sampler.open("pebble")


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an adapter and a developer prompt, by the functions that write one."""
    folder = tmp_path_factory.mktemp("lora")
    settings = {"use_peft": True, "developer_prompt": SYSTEM, "temperature": 0.8, "max_completion_length": 24}
    config = build(settings)
    (folder / "config.yaml").write_text(dump(config))
    policy = load_policy(config.model)
    torch.manual_seed(0)
    for step, name in enumerate(("checkpoint-1", "final_model"), 1):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        save_model(model_writer(policy), folder / name, step)
    return folder


def greedy_by_transformers(model, sampler: Sampler, prompt, max_tokens: int) -> list[int]:
    ids = torch.tensor([sampler.encode(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
        temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def test_greedy_tokens_are_those_of_transformers(pebble: Sampler) -> None:
    model = AutoModelForCausalLM.from_pretrained(pebble.policy.lm.name_or_path)
    for prompt in (QUESTION, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]):
        (answer,) = pebble.sample(prompt, temperature=0, max_tokens=48)
        assert list(answer.token_ids) == greedy_by_transformers(model, pebble, prompt, 48)
        assert answer.finish is (Finish.STOP if answer.token_ids[-1] == 5 else Finish.LENGTH)


@pytest.mark.slow
def test_greedy_tokens_of_smollm2_are_those_of_transformers() -> None:
    sampler = Sampler.open("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(sampler.policy.lm.name_or_path, dtype=torch.float32)
    (answer,) = sampler.sample("Name three colors.", temperature=0, max_tokens=40)
    assert list(answer.token_ids) == greedy_by_transformers(model, sampler, "Name three colors.", 40)
    pieces = list(sampler.stream("Write five emojis: 🌤️ 🦀", seed=3, max_tokens=40))
    assert pieces[-1].answer is not None
    assert "".join(piece.text for piece in pieces) == pieces[-1].answer.text
    assert len([piece for piece in pieces if piece.text]) > 5


def test_pieces_are_the_whole_answer(pebble: Sampler) -> None:
    settings = {"seed": 3, "temperature": 1.3, "max_tokens": 40}
    whole = pebble.sample(QUESTION, 4, **settings)
    pieces = list(pebble.stream(QUESTION, 4, **settings))
    for number, answer in enumerate(whole):
        own = [piece for piece in pieces if piece.sample == number]
        assert "".join(piece.text for piece in own) == answer.text
        assert tuple(token for piece in own for token in piece.token_ids) == answer.token_ids
        assert tuple(value for piece in own for value in piece.logprobs) == answer.logprobs
        assert own[-1].answer == answer and all(piece.answer is None for piece in own[:-1])
        assert max(len(piece.token_ids) for piece in own) <= 2
    assert len({answer.text for answer in whole}) > 1
    assert pebble.sample(QUESTION, 4, **{**settings, "seed": 4}) != whole


def test_tokens_can_be_inspected(pebble: Sampler) -> None:
    (answer,) = pebble.sample(QUESTION, seed=2, temperature=1.0, max_tokens=24)
    tokens = pebble.inspect(answer, top=300)
    assert [token.token_id for token in tokens] == list(answer.token_ids)
    assert [token.logprob for token in tokens] == pytest.approx(answer.logprobs, abs=1e-4)
    for token in tokens:
        chances = [math.exp(logprob) for _, logprob in token.likeliest]
        assert chances == sorted(chances, reverse=True) and 0.99 < sum(chances) <= 1.00001
        entropy = -sum(chance * math.log(chance) for chance in chances if chance > 0)
        assert token.entropy == pytest.approx(entropy, abs=0.03)
    assert tokens[-1].text == "<|end|>"


def test_batches_have_the_answers_of_each_prompt(pebble: Sampler) -> None:
    prompts = [QUESTION, "Spell this word backward: stone", pebble.encode_text("4 + 7")]
    together = pebble.sample_batch(prompts, 2, seed=1, max_tokens=16)
    alone = [pebble.sample(prompt, 2, seed=1, max_tokens=16) for prompt in prompts]
    assert [[a.token_ids for a in row] for row in together] == [[a.token_ids for a in row] for row in alone]
    assert pebble.encode("a\udcff", system="b\ud800") == pebble.encode("a?", system="b?")
    assert [row[0].prompt_ids for row in together] == [pebble.encode(prompt) for prompt in prompts]


def test_a_piece_never_splits_a_character() -> None:
    texts = ["héllo", "🦀🌤️ 漢字", "\u0000é", "a" * 9]
    for text in texts:
        data = text.encode()
        stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
        pieces = [stream.push(list(data[: end + 1])) for end in range(len(data))]
        assert "".join(pieces) == text and stream.finish(text) == ""
        assert sum(bool(piece) for piece in pieces) == len(text)
    cut = "ab🦀".encode()[:-1]  # max_tokens may end within a character
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = [stream.push(list(cut[: end + 1])) for end in range(len(cut))]
    assert "".join(pieces) == "ab" and stream.finish(cut.decode(errors="replace")) == "\ufffd"


def test_stop_texts_end_an_answer(pebble: Sampler) -> None:
    settings = {"seed": 3, "temperature": 1.3, "max_tokens": 40}
    whole = pebble.sample(QUESTION, 4, **settings)
    stop = ["</ans", "</think>", "never"]
    cut = pebble.sample(QUESTION, 4, stop=stop, **settings)
    pieces = list(pebble.stream(QUESTION, 4, stop=stop, **settings))
    for number, (answer, short) in enumerate(zip(whole, cut, strict=True)):
        ends = [end for text in stop if (end := answer.text.find(text)) >= 0]
        assert short.text == answer.text[: min(ends)] and short.finish is Finish.STOP
        assert answer.token_ids[: len(short.token_ids)] == short.token_ids
        assert len(short.token_ids) < len(answer.token_ids)
        own = [piece for piece in pieces if piece.sample == number]
        assert "".join(piece.text for piece in own) == short.text and own[-1].answer == short
    stops = StopTexts(["\nUser:"])
    assert [stops.push(piece) for piece in ("a\n", "\nUs", "ual\n", "User", ": b")] == [
        "a", "\n", "\nUsual", "", "",
    ]  # fmt: skip
    assert stops.is_reached and StopTexts([]).push("a") == "a"


def test_a_model_without_a_chat_template(pebble: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pebble.policy.tokenizer, "chat_template", None)
    sampler = Sampler(pebble.source, pebble.policy)
    chat = Conversation(sampler, system="Be brief.", temperature=0.0, max_tokens=4)
    first = chat.ask("4 + 3")
    second = chat.ask("5 + \udcff3")
    text = f"Be brief.\nUser: 4 + 3\nAssistant: {first.text}\nUser: 5 + ?3\nAssistant: "
    assert second.prompt_ids == sampler.encode_text(text)
    assert sampler.next_question == ("\nUser:",) and pebble.next_question == ()


def test_a_run_with_an_adapter(lora_run: Path) -> None:
    from peft import PeftModel

    sampler = Sampler.open(lora_run)
    assert sampler.source.weights == lora_run / "final_model"
    assert sampler.system == SYSTEM and SYSTEM in sampler.policy.tokenizer.decode(sampler.encode("Hi"))
    assert SYSTEM not in sampler.policy.tokenizer.decode(sampler.encode("Hi", system=""))
    assert (sampler.defaults.temperature, sampler.defaults.max_tokens) == (0.8, 24)
    base = sampler.open_base()
    assert base.source.name == "pebble" and base.encode("Hi") == sampler.encode("Hi")
    answers = []
    for model, adapter in ((base, None), (sampler, lora_run / "final_model")):
        whole = AutoModelForCausalLM.from_pretrained(base.policy.lm.name_or_path)
        if adapter is not None:
            whole = PeftModel.from_pretrained(whole, str(adapter))
        (answer,) = model.sample(QUESTION, temperature=0)
        assert list(answer.token_ids) == greedy_by_transformers(whole, model, QUESTION, 24)
        answers.append(answer.logprobs)
    assert answers[0] != answers[1]
    for checkpoint in ("final_model", "checkpoint-1"):
        source = find_source(lora_run / checkpoint)
        assert (source.weights, source.run) == (lora_run / checkpoint, lora_run)
    os.rename(lora_run / "final_model", lora_run / "elsewhere")  # an unfinished run
    assert find_source(lora_run).weights == lora_run / "checkpoint-1"


def test_a_conversation_remembers(pebble: Sampler) -> None:
    chat = Conversation(pebble, system=SYSTEM, temperature=0.0, max_tokens=16)
    first = chat.ask("4 + 3")
    assert chat.messages == [
        {"role": "user", "content": "4 + 3"},
        {"role": "assistant", "content": first.text},
    ]
    second = chat.ask("5 + 3")
    both = [{"role": "system", "content": SYSTEM}, *chat.messages[:3]]
    assert second.prompt_ids == pebble.encode(both)
    again = "".join(piece.text for piece in chat.again())
    assert again == second.text and len(chat.messages) == 4
    chat.settings["temperature"] = 1.5
    assert len({"".join(piece.text for piece in chat.again()) for _ in range(5)}) > 1
    pieces = chat.stream("6 + 3")
    begun = next(pieces).text
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": begun}
    chat.clear()
    with pytest.raises(UserError):
        chat.again()


def test_bad_prompts_and_settings_are_refused(
    pebble: Sampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = pebble.policy.max_length
    assert longest is not None
    wrong = [
        ({"prompt": []}, "empty"),
        ({"prompt": [{"role": "user"}]}, "message"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "user's message"),
        ({"prompt": [7] * longest}, "tokens"),
        ({"prompt": [7, 1_000_000]}, "token ids"),
        ({"prompt": "x", "n": 0}, "n of at least 1"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "top_p": float("nan")}, "top_p"),
    ]
    for settings, named in wrong:
        with pytest.raises(UserError, match=named):
            pebble.sample(**settings)
    (tmp_path / "config.yaml").write_text("model_name_or_path: pebble\n")
    with pytest.raises(UserError, match="no checkpoint yet"):
        Sampler.open(tmp_path)
    with pytest.raises(UserError, match="no model folder"):
        Sampler.open(tmp_path / "nothing")
    with pytest.raises(UserError, match="folder of runs"):
        Sampler.open(tmp_path.parent)
    (tmp_path / "outputs/mine").mkdir(parents=True)
    os.rename(tmp_path / "config.yaml", tmp_path / "outputs/mine/config.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="did you mean outputs/mine"):
        Sampler.open("mine")
    with pytest.raises(UserError, match="belongs to no run"):
        pebble.open_base()
    (request,), sampling = pebble._requests([[7] * (longest - 3)], 1, max_tokens=9)  # as much as fits
    assert request.limit(0, sampling) == 3 and sampling.max_tokens == 3
    for length, room in ((10, 2038), (2000, 48), (2040, 2056)):  # a growing conversation: 2,048, then 4,096
        (request,), sampling = pebble._requests([[7] * length], 1, max_tokens=9)
        assert request.limit(0, sampling) == 9 and sampling.max_tokens == room


def test_a_name_that_is_nothing_here_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no model or run 'nothere' here.*with its owner"):
        find_source("nothere")
    assert find_source("someone/model").name == "someone/model" and find_source("pebble").run is None
