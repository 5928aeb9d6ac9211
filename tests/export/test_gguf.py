"""GGUF files: read again by transformers, they give the same tokens and logits; what can't be is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.support.exports import tiny_model
from whetstone.errors import UserError
from whetstone.export.folder import BOUNDS, compare_gguf, export
from whetstone.export.gguf import check_architecture, write_gguf
from whetstone.export.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, read_vocabulary
from whetstone.model.hub import resolve
from whetstone.run.source import find_source

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level(pre: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all bytes, a few merges, two special tokens and a plain added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "1"), ("m", "i")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizers.NFC(), pre, decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    return tokenizer


def qwen_split() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_file_computes_what_the_model_does(model_type: str, tmp_path: Path) -> None:
    own_tokenizer = None if model_type == "llama" else byte_level(qwen_split())
    # transformers takes the quotient for the heads of a Qwen 2 GGUF.
    settings: dict[str, Any] = {} if own_tokenizer is None else {"vocab_size": 300, "hidden_size": 96}
    head_dims = {"llama": 16, "qwen2": 24, "qwen3": 40}
    folder = tiny_model(
        tmp_path / "base", model_type, own_tokenizer, head_dim=head_dims[model_type], **settings
    )
    exported = export(find_source(str(folder)), tmp_path / "out", gguf=["f16", "q8_0"])
    f16, q8_0 = exported.differences["base-f16.gguf"], exported.differences["base-q8_0.gguf"]
    assert 0 < f16.relative < 1e-3 < q8_0.relative < 3e-2
    assert exported.files["base-q8_0.gguf"] < exported.files["base-f16.gguf"]
    (tmp_path / "alone").mkdir()  # without the other files of the tokenizer
    (tmp_path / "alone" / "m.gguf").hardlink_to(tmp_path / "out" / "base-f16.gguf")
    again = AutoTokenizer.from_pretrained(str(tmp_path / "alone"), gguf_file="m.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the 11 <think>mi\n\n  the<|im_end|>", "What is 4 + 73?\n<think>"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_wrong_weights_are_found(tmp_path: Path) -> None:
    """The comparison fails for a file of another model, so a wrong order of rows would be seen."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "base"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    write_gguf(tmp_path / "a.gguf", model, tokenizer, kind="f16", name="a")
    assert compare_gguf(tmp_path / "a.gguf", model, tokenizer, "f16").relative < BOUNDS["f16"]
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight.copy_(weight.view(2, 2, 8, -1).transpose(1, 2).reshape(weight.shape))
    with pytest.raises(UserError, match="other logits"):
        compare_gguf(tmp_path / "a.gguf", model, tokenizer, "f16")


def test_the_vocabulary_of_pebble() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("pebble"))
    vocabulary = read_vocabulary(tokenizer, 108)
    assert vocabulary.tokens[10:13] == ["Ċ", "Ġ", "!"] and vocabulary.tokens[-1] == "[PAD107]"
    assert vocabulary.types[:6] == [CONTROL] * 6 and vocabulary.types[6:10] == [USER_DEFINED] * 4
    assert vocabulary.types[10] == NORMAL and vocabulary.types[-2:] == [UNUSED] * 2
    assert (vocabulary.pre, vocabulary.merges) == ("gpt-2", [])


DIGITS = pre_tokenizers.Digits(individual_digits=True)
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        (PLAIN, "gpt-2"),
        (pre_tokenizers.Sequence([DIGITS, PLAIN]), "smollm"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), PLAIN]), None),
        (qwen_split(), "qwen2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"), BYTES]
            ),
            "llama-bpe",
        ),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("x"), "isolated"), BYTES]), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.Whitespace(), None),
    ],
)
def test_only_known_pre_tokenizers_are_named(pre: Any, name: str | None) -> None:
    tokenizer = byte_level(pre)
    if name is None:
        with pytest.raises(UserError, match="byte-level BPE"):
            read_vocabulary(tokenizer, 300)
        return
    vocabulary = read_vocabulary(tokenizer, 300)
    assert vocabulary.pre == name and vocabulary.merges[:2] == ["t h", "th e"]


def test_other_architectures_are_refused() -> None:
    from transformers import Gemma2Config, LlamaConfig, Qwen2Config

    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for config in (
        Gemma2Config(),
        LlamaConfig(rope_parameters=scaled),
        LlamaConfig(attention_bias=True),
        LlamaConfig(mlp_bias=True),
        LlamaConfig(hidden_act="gelu"),
        Qwen2Config(use_sliding_window=True),
    ):
        with pytest.raises(UserError, match="GGUF") as caught:
            check_architecture(config)
        assert "\n" not in str(caught.value) and "--gguf" in str(caught.value)
    check_architecture(LlamaConfig())
