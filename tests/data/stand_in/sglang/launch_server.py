"""`python -m sglang.launch_server` of the tests: takes SGLang's flags, those it has no use for in silence."""

import argparse
from pathlib import Path

import torch

from tests.support.protocol_server import ModelServer

parser = argparse.ArgumentParser()
parser.add_argument("--model-path", type=Path, required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--context-length", type=int)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that each completion takes longer")
parser.add_argument("--broken", action="store_true", help="can't start")
given, _ = parser.parse_known_args()
if given.broken:
    raise ValueError("no such model here")
torch.set_num_threads(1)
server = ModelServer("sglang", given.model_path, given.port, context_length=given.context_length)
server.delay_s = given.delay
server.thread.join()
