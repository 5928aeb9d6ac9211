"""A folder with a model of some shape, random weights and a tokenizer that has a word for every token.

    python benchmarks/random_model.py '{"size": "1.5b", "folder": "/tmp/whetstone-1.5b"}'

The tokenizer is of Qwen2's kind without merges: a letter of a prompt is a token, so that a prompt can be
given to anybody as text and has exactly as many tokens as were meant; every other token is a word (t300), so
that whatever a model with random weights samples can be read. Speed does not depend on weights.
"""

import json
import sys
from pathlib import Path

import torch
from rollout_work import VOCABULARY, model_config

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def make(size: str, folder: Path) -> None:
    """Nothing to do where it has been made already."""
    from transformers import AutoModelForCausalLM

    done = folder / "done.json"
    if done.is_file():
        return
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(model_config(size), dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    make_tokenizer(VOCABULARY).save_pretrained(folder)
    done.write_text(json.dumps({"size": size}))


def make_tokenizer(num_words: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*SPECIAL, *bytes_])}
    words |= {f"t{number}": number for number in range(len(words), num_words)}
    tokenizer = Tokenizer(models.BPE(words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def text_of(token_ids: list[int]) -> str:
    """A text of as many tokens."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    make(task["size"], Path(task["folder"]))
