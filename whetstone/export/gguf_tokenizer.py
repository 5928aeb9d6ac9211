"""The tokenizer's part of a GGUF file: tokens, types, merges, pre-tokenizer, special ids, chat template.

GGUF names the pre-tokenizer and does not carry it, so only known ones can be written. Byte-level BPE is
supported, and a vocabulary of single ASCII characters (pebble), which is byte-level BPE without merges.
"""

import json
from dataclasses import dataclass
from typing import Any

from whetstone.errors import UserError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_QWEN2: "qwen2", _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe"}
_CHARACTERS = r"[\s\S]"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer, a row for each row of the embedding."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str  # llama.cpp's name of the pre-tokenizer


def read_vocabulary(tokenizer: Any, num_rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer of transformers; rows without a token are unused ones."""
    if not tokenizer.is_fast:
        raise UserError("GGUF can't be written: this tokenizer has no tokenizer.json. Export without --gguf.")
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = document["model"]
    pre = _pre_tokenizer(document)
    if model["type"] == "BPE" and pre is not None and not model.get("byte_fallback"):
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        spelled = {number: token for token, number in model["vocab"].items()}
    elif model["type"] == "WordLevel" and _splits_characters(document):
        pre, merges = "gpt-2", []
        spelled = {number: _byte_level(token) for token, number in model["vocab"].items()}
    else:
        raise UserError(
            f"GGUF can't be written: the tokenizer ({model['type']}) is not byte-level BPE with the "
            "pre-tokenizer of GPT-2, SmolLM, Llama 3 or Qwen 2: export without --gguf."
        )
    types = dict.fromkeys(spelled, NORMAL)
    for added in document["added_tokens"]:
        spelled[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return Vocabulary(
        tokens=[spelled.get(number, f"[PAD{number}]") for number in range(num_rows)],
        types=[types.get(number, UNUSED) for number in range(num_rows)],
        merges=merges,
        pre=pre,
    )


def write_tokenizer(writer: Any, tokenizer: Any, model: Any) -> None:
    """Add the keys `tokenizer.*` to a GGUF writer."""
    from gguf import GGUFValueType, Keys

    vocabulary = read_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    # Not by add_token_merges, which leaves an empty list out: readers want the key.
    writer.add_key_value(
        Keys.Tokenizer.MERGES, vocabulary.merges, GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING
    )
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_eot_token_id, _other_stop(tokenizer, model)),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    first = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _other_stop(tokenizer: Any, model: Any) -> int | None:
    """A token that ends an answer beside the tokenizer's own."""
    stops = model.generation_config.eos_token_id
    stops = [] if stops is None else [stops] if isinstance(stops, int) else stops
    return next((number for number in stops if number != tokenizer.eos_token_id), None)


def _pre_tokenizer(document: dict[str, Any]) -> str | None:
    """llama.cpp's name of a byte-level pre-tokenizer; None: it has none."""
    if (document["normalizer"] or {}).get("type", "NFC") != "NFC":
        return None
    stage = document["pre_tokenizer"] or {}
    stages = stage["pretokenizers"] if stage.get("type") == "Sequence" else [stage]
    if not stages or stages[-1].get("type") != "ByteLevel" or stages[-1]["add_prefix_space"]:
        return None
    kinds = [entry["type"] for entry in stages[:-1]]
    if not all(entry.get("individual_digits", True) for entry in stages):  # smollm splits each digit
        return None
    if stages[-1]["use_regex"]:
        return {(): "gpt-2", ("Digits",): "smollm"}.get(tuple(kinds))
    if kinds != ["Split"] or stages[0]["behavior"] != "Isolated" or stages[0]["invert"]:
        return None
    return _SPLITS.get(stages[0]["pattern"].get("Regex"))


def _splits_characters(document: dict[str, Any]) -> bool:
    """Whether every character is a token of its own, all of them ASCII."""
    split = document["pre_tokenizer"] or {}
    added = {entry["content"] for entry in document["added_tokens"]}
    tokens = set(document["model"]["vocab"]) - added
    return (
        split.get("type") == "Split"
        and split["pattern"] == {"Regex": _CHARACTERS}
        and all(len(token) == 1 and token.isascii() for token in tokens)
    )


def _byte_level(token: str) -> str:
    """ASCII text in the alphabet of byte-level BPE, where a space is `Ġ` and a newline `Ċ`."""
    return "".join(c if c.isprintable() and c != " " else chr(256 + _rank(ord(c))) for c in token)


def _rank(code: int) -> int:
    """The number of a byte without a visible character among all of these."""
    return code if code <= ord(" ") else code - 0x7F + 0x21
