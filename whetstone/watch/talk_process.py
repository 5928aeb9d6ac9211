"""The process of Talk: loads a checkpoint and samples answers. What goes wrong ends this process alone."""

import contextlib
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from whetstone.errors import UserError
from whetstone.inference.answers import Answer, TokenDetails
from whetstone.inference.sampler import Sampler
from whetstone.types import Finish

TOP = 4  # likely tokens that are sent beside each token of an answer


def serve(connection: Connection) -> None:
    """Requests: `open` a checkpoint, `answer` messages, `stop` the answer. Events go back."""
    _step_back()
    sampler: Sampler | None = None
    while True:
        request = connection.recv()
        try:
            if request["do"] == "open":
                sampler = _open(connection, **request["settings"])
            elif request["do"] == "answer":
                assert sampler is not None
                _answer(connection, sampler, **request["settings"])
        except UserError as error:  # the model can be used again
            connection.send({"error": str(error)})
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            connection.send({"error": f"{type(error).__name__}: {reason[:300]}", "is_fatal": True})
            return


def _step_back() -> None:
    """The first to end when memory runs out, the last to get the processor, and silent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError):
        os.nice(10)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silent, stream.fileno())


def _open(connection: Connection, *, checkpoint: str, device: str, num_threads: int) -> Sampler:
    torch.set_num_threads(num_threads)
    sampler = Sampler.open(checkpoint, device=device)
    connection.send(
        {
            "opened": {
                "device": str(sampler.policy.device),
                "temperature": sampler.defaults.temperature,
                "max_tokens": sampler.defaults.max_tokens,
                "system": sampler.system,
            }
        }
    )
    return sampler


def _answer(
    connection: Connection, sampler: Sampler, *, messages: list[dict[str, str]], **settings: Any
) -> None:
    text, ids, logprobs, answer = "", [], [], None
    pieces = sampler.stream(messages, stop=sampler.next_question, **settings)
    with contextlib.closing(pieces):
        for piece in pieces:
            text, answer = text + piece.text, piece.answer
            ids, logprobs = [*ids, *piece.token_ids], [*logprobs, *piece.logprobs]
            connection.send({"text": piece.text, "logprobs": [round(x, 4) for x in piece.logprobs]})
            if connection.poll() and connection.recv()["do"] == "stop":
                break
    if answer is None:  # stopped
        prompt_ids = sampler.encode(messages, settings.get("system"))
        answer = Answer(
            text=text,
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish=Finish.STOP,
            prompt_ids=prompt_ids,
        )
        finish = "stopped"
    else:
        finish = str(answer.finish)
    details = sampler.inspect(answer, top=TOP) if answer.token_ids else []
    prefix = sampler.chat.config.assistant_prefix
    connection.send({"end": {"finish": finish, "message": prefix + text, **_columns(details)}})


def _columns(details: list[TokenDetails]) -> dict[str, Any]:
    """The tokens of an answer as the page takes them."""
    return {
        "ids": [token.token_id for token in details],
        "texts": {token.token_id: token.text for token in details},
        "numbers": {
            "logprob": [round(token.logprob, 4) for token in details],
            "entropy": [round(token.entropy, 4) for token in details],
        },
        "likeliest": [[[text, round(logprob, 4)] for text, logprob in token.likeliest] for token in details],
    }
