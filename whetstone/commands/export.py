"""`whet export`: write the model of a run for transformers, vLLM and llama.cpp."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from whetstone.commands.parser import CommandParser
from whetstone.terminal.text import size

if TYPE_CHECKING:
    from whetstone.export.folder import Exported

DESCRIPTION = """
Write the final model of a run, or a checkpoint, as one ordinary model folder: LoRA and DoRA merged, a 4-bit
base dequantized, safetensors in shards, tokenizer, chat template, generation config and a model card.
--gguf adds a file for llama.cpp; it is loaded again and its logits are compared.
"""
EXAMPLES = """
whet export outputs/quickstart
whet export outputs/quickstart --dtype bf16 --gguf q8_0
whet export outputs/grpo_trained/checkpoint-100 --output my_model
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("source", metavar="RUN", help="the folder of a run, a checkpoint or a model")
    parser.add_argument("--output", metavar="DIR", type=Path, help="(default: RUN/export)")
    parser.add_argument(
        "--dtype", choices=("bf16", "f16", "f32"), help="precision of the weights (default: as stored)"
    )
    parser.add_argument(
        "--gguf", choices=("f16", "q8_0"), action="append", default=[], help="add a GGUF file; repeatable"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights (default: 5GB)"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not load GGUF files again, which takes memory"
    )


def run(args: argparse.Namespace) -> None:
    from whetstone.terminal.display import long_command
    from whetstone.terminal.stages import stage

    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of transformers, which read it when they are imported
    with long_command():
        with stage("loading torch"):
            from whetstone.export.folder import export
            from whetstone.run.source import find_source
        source = find_source(args.source)
        exported = export(
            source,
            args.output,
            dtype=args.dtype,
            gguf=args.gguf,
            max_shard_size=args.max_shard_size,
            verify=not args.no_verify,
        )
    step = f" (step {source.step})" if source.run is not None else ""
    print(f"{source.model}{step} is in {exported.folder}, in {exported.dtype}:")
    print("\n".join(lines(exported)))


def lines(exported: "Exported") -> list[str]:
    """A line for each file, with the difference of GGUF logits."""
    width = max(map(len, exported.files))
    rows = []
    for name, num_bytes in exported.files.items():
        difference = exported.differences.get(name)
        note = f"   logits differ by at most {difference.largest:.2g}" if difference else ""
        rows.append(f"  {name:<{width}}  {size(num_bytes):>8}{note}")
    return rows
