"""GGUF files in the real llama.cpp: text, greedy tokens, logits and chat are those of transformers."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export.test_gguf import byte_level, qwen_split
from tests.support.exports import (
    NUM_TOKENS,
    QUESTIONS,
    completion_logits,
    engine_tokens,
    make_run,
    prompts,
    tiny_model,
)
from whetstone.export.folder import Exported, export
from whetstone.model.verification import TEXTS
from whetstone.run.source import find_source

pytestmark = pytest.mark.llama_cpp
xllamacpp: Any = pytest.importorskip("xllamacpp", reason="make test-llama installs it: llama.cpp in a wheel")

NUM_BEST = 10
TIE = 0.1  # logits nearer than this are equal to f16
RUNS = {
    "pebble": ("pebble", {}),
    "pebble-lora": ("pebble", {"use_peft": True, "lora_r": 4}),
    "smollm2": ("smollm2-135m", {}),
    "smollm2-lora": ("smollm2-135m", {"use_peft": True, "lora_r": 8}),
}


@pytest.fixture(scope="module", params=RUNS)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Exported, list[list[int]]]:
    """Both GGUF files of a run whose weights differ from its base, and its engine's greedy answers."""
    name, settings = RUNS[request.param]
    run = tmp_path_factory.mktemp("runs") / "run"
    policy = make_run(run, name, 0.03 if name == "pebble" else 0.01, **settings)
    end = policy.tokenizer.eos_token_id
    rows = engine_tokens(policy)  # goes on after an end token, as llama.cpp does not
    expected = [row[: row.index(end) + 1] if end in row else row for row in rows]
    assert min(map(len, expected)) > 1
    return export(find_source(str(run)), dtype="f32", gguf=["f16", "q8_0"], verify=False), expected


class Llama:
    """A GGUF file in llama.cpp's own server, in this process."""

    def __init__(self, exported: Exported, kind: str) -> None:
        (path,) = exported.folder.glob(f"*-{kind}.gguf")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 256, 1, 2
        self.server = xllamacpp.Server(params)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self.server.listening_address + path,
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def greedy(
        self, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS
    ) -> tuple[list[int], list[dict[int, float]]]:
        """Tokens up to an end token, and the best logprobs at each of them."""
        reply = self.post(
            "/completion",
            prompt=list(prompt),
            n_predict=num_tokens,
            temperature=0.0,
            n_probs=NUM_BEST,
            return_tokens=True,
            cache_prompt=False,
        )
        best = [
            {entry["id"]: entry["logprob"] for entry in place["top_logprobs"]}
            for place in reply.get("completion_probabilities", ())
        ]
        return reply["tokens"], best[: len(reply["tokens"])]


def load_folder(exported: Exported) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    return model, AutoTokenizer.from_pretrained(exported.folder)


def logprob_differences(
    model: Any, tokenizer: Any, answers: list[tuple[list[int], list[dict[int, float]]]]
) -> Iterator[float]:
    """llama.cpp's logprobs against those of transformers after the same tokens."""
    logits = completion_logits(model, tokenizer, [tokens for tokens, _ in answers])
    for rows, (_, best) in zip(logits, answers, strict=True):
        for row, place in zip(rows.log_softmax(-1), best, strict=True):
            assert len(place) == NUM_BEST
            yield from (abs(float(row[token]) - logprob) for token, logprob in place.items())


def test_text_is_the_same_tokens(exported: tuple[Exported, Any]) -> None:
    tokenizer = load_folder(exported[0])[1]
    llama = Llama(exported[0], "f16")
    texts = (*TEXTS, *QUESTIONS, "<think>4+73=77\n\n  77-12=65</think><answer>65</answer>")
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert llama.post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"] == ids
        assert llama.post("/detokenize", tokens=ids)["content"] == tokenizer.decode(ids)


def test_f16_gives_the_greedy_tokens_of_the_run(exported: tuple[Exported, list[list[int]]]) -> None:
    """llama.cpp multiplies in f16, so two tokens whose logits are nearly equal may change places."""
    folder, expected = exported
    model, tokenizer = load_folder(folder)
    llama = Llama(folder, "f16")
    answers = [llama.greedy(prompt) for prompt in prompts(tokenizer)]
    largest = max(logprob_differences(model, tokenizer, answers))
    print(f"f16: logprobs differ by at most {largest:.2g}")
    assert largest < TIE
    num_equal = 0
    for (tokens, _), row, logits in zip(
        answers, expected, completion_logits(model, tokenizer, expected), strict=True
    ):
        pairs = enumerate(zip(tokens, row, strict=False))
        place = next((place for place, (ours, own) in pairs if ours != own), None)
        if place is None:
            assert tokens == row
            num_equal += 1
        else:
            gap = float(logits[place][row[place]] - logits[place][tokens[place]])
            print(f"f16: another token at {place}, whose logit is {gap:.2g} lower")
            assert gap < TIE
    assert num_equal >= 2


def test_q8_0_begins_as_the_run_and_has_its_logprobs(exported: tuple[Exported, list[list[int]]]) -> None:
    folder, expected = exported
    model, tokenizer = load_folder(folder)
    llama = Llama(folder, "q8_0")
    answers = [llama.greedy(prompt) for prompt in prompts(tokenizer)]
    assert [tokens[0] for tokens, _ in answers] == [tokens[0] for tokens in expected]
    differences = sorted(logprob_differences(model, tokenizer, answers))
    print(f"q8_0: {sum(a == b for (a, _), b in zip(answers, expected, strict=True))} of 3 answers are equal")
    print(f"q8_0: logprobs differ by {differences[len(differences) // 2]:.2g}, at most {differences[-1]:.2g}")
    assert differences[len(differences) // 2] < 0.2 and differences[-1] > 1e-3


def test_a_chat_is_answered_as_in_transformers(exported: tuple[Exported, Any]) -> None:
    """By the chat template and the end tokens in the file, as a user of llama.cpp would."""
    model, tokenizer = load_folder(exported[0])
    llama = Llama(exported[0], "f16")
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options)
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :]
        reply = llama.post("/v1/chat/completions", messages=messages, temperature=0.0, max_tokens=24)
        (answer,) = reply["choices"]
        assert answer["message"]["content"] == tokenizer.decode(ids, skip_special_tokens=True)
        stopped = int(ids[-1]) == tokenizer.eos_token_id
        assert answer["finish_reason"] == ("stop" if stopped else "length")
        assert reply["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_architectures_with_random_weights(model_type: str, tmp_path: Path) -> None:
    """Order of rows, biases, norms of heads: the ten best logprobs of the next token."""
    tokenizer = None if model_type == "llama" else byte_level(qwen_split())
    head_dim = {"llama": 16, "qwen2": 24, "qwen3": 128}[model_type]
    settings = {} if tokenizer is None else {"vocab_size": 300, "hidden_size": 96}
    folder = tiny_model(tmp_path / "base", model_type, tokenizer, head_dim=head_dim, **settings)
    exported = export(find_source(str(folder)), tmp_path / "out", dtype="f32", gguf=["f16"], verify=False)
    model, _ = load_folder(exported)
    llama = Llama(exported, "f16")
    differences = []
    for length in range(4, 24):
        prompt = tuple(range(20, 20 + 3 * length, 3))
        with torch.no_grad():
            row = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        _, best = llama.greedy(prompt, num_tokens=1)  # nothing for a token that is a part of a character
        differences += [
            abs(float(row[token]) - logprob) for place in best for token, logprob in place.items()
        ]
    print(f"{model_type}: {len(differences)} logprobs differ by at most {max(differences):.2g}")
    assert len(differences) >= 5 * NUM_BEST and max(differences) < TIE
