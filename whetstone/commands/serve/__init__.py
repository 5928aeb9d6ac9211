"""`whet serve`: a model behind an OpenAI-compatible endpoint, or the rollout servers of a configuration."""

import argparse
import os
from pathlib import Path

from whetstone.commands.parser import CommandParser, add_settings, number, source_and_settings
from whetstone.config import load
from whetstone.config.load import recipe_names
from whetstone.errors import UserError

DESCRIPTION = """
Serve a model over HTTP as OpenAI's API does: /v1/chat/completions, /v1/completions, /v1/models, /health. The
model is that of a run, of a checkpoint, of a model folder, or pebble, smollm2-135m or a hub name. Requests
are sampled together, and join while others are sampled. Ctrl-C ends it. docs/serve.md has the details.

With a configuration (a YAML file, a recipe's name or key=value settings) it starts the rollout servers of
that configuration (vLLM, SGLang), restarts a dead one, and stops them at Ctrl-C. docs/servers.md has these.
"""
EXAMPLES = """
whet serve outputs/quickstart
whet serve pebble --adapter sums=outputs/sums --adapter dates=outputs/dates --port 8001
whet serve outputs/quickstart --host 0.0.0.0 --api-key SECRET
whet serve config/grpo.yaml rollout_engine=vllm server_devices=[6,7]
"""
MODEL_OPTIONS = (
    "host",
    "port",
    "api_key",
    "adapter",
    "name",
    "system",
    "max_length",
    "max_sequences",
    "device",
)
PORT = 8000
KEY_VARIABLE = "WHET_API_KEY"


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser, "RUN|CHECKPOINT|MODEL|CONFIG")
    parser.add_argument("--config", metavar="FILE", help="a configuration, for its rollout servers")
    parser.add_argument("--host", metavar="ADDRESS", help="(default: 127.0.0.1, this machine alone)")
    parser.add_argument(
        "--port", type=number(int, 0), metavar="N", help=f"(default: {PORT}; 0: any free one)"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"clients must send it (default: ${KEY_VARIABLE})")
    parser.add_argument(
        "--adapter",
        action="append",
        metavar="NAME=PATH",
        help="a LoRA adapter (folder, run or checkpoint) that requests choose by this name; repeatable",
    )
    parser.add_argument("--name", help="the name of the model in requests (default: that of the run)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt; '' for none (default: the run's)")
    parser.add_argument(
        "--max-length", type=number(int, 2), metavar="N", help="tokens of a prompt with its answer at most"
    )
    parser.add_argument(
        "--max-sequences", type=number(int, 1), metavar="N", help="answers that are sampled at once"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="auto: the GPU, if there is one")


def run(args: argparse.Namespace) -> None:
    if _names_config(args):
        from whetstone.commands.serve.rollout_servers import serve_rollouts

        wrong = [name for name in MODEL_OPTIONS if getattr(args, name) is not None]
        if wrong:
            raise UserError(
                f"--{wrong[0].replace('_', '-')} is for serving a model, not for the rollout servers of a "
                "configuration: those have the keys server_host, server_port and server_args."
            )
        source, settings = source_and_settings(args)
        serve_rollouts(load(source or "quickstart", settings).config)
        return
    if args.source is None:
        raise UserError("Nothing is named to serve: give a run, such as outputs/quickstart, or a model.")
    from whetstone.commands.serve.model import serve_model

    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    serve_model(
        args.source,
        host=args.host or "127.0.0.1",
        port=PORT if args.port is None else args.port,
        api_key=key or None,
        adapters=_adapters(args.adapter or []),
        served_name=args.name,
        system=args.system,
        max_length=args.max_length,
        max_sequences=args.max_sequences,
        device=args.device or "auto",
    )


def _names_config(args: argparse.Namespace) -> bool:
    """A YAML file, a recipe that is no folder here, or settings."""
    source = args.source
    if args.config is not None or args.settings or (source is not None and "=" in source):
        return True
    if source is None or Path(source).is_dir():
        return False
    return source.endswith((".yaml", ".yml")) or source in recipe_names()


def _adapters(entries: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise UserError(f"--adapter {entry[:100]}: give NAME=PATH, such as sums=outputs/sums.")
        if name in adapters:
            raise UserError(f"--adapter {name} is there twice: give each adapter a name of its own.")
        adapters[name] = path
    return adapters
