"""Talk on a GPU: a run that begins to train gets the device back, and Talk goes on beside it on the CPU."""

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest
import torch

from tests.support.waiting import wait_until
from whetstone.config import build, dump
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer
from whetstone.run.checkpoint import save_model
from whetstone.watch.talk import Talk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
REQUEST = {"run": "run", "messages": [{"role": "user", "content": "5 + 8 - 7 ="}]}


def test_a_run_that_begins_gets_the_device(tmp_path: Path) -> None:
    config = build({"max_completion_length": 64})
    (tmp_path / "config.yaml").write_text(dump(config))
    save_model(model_writer(load_policy(config.model)), tmp_path / "final_model", 1)
    talk = Talk(lambda: {"run": tmp_path})
    with contextlib.closing(talk), contextlib.closing(talk.answer(REQUEST)) as events:
        opened = next(event["opened"] for event in events if "opened" in event)
        assert opened["device"].startswith("cuda") and "end" in list(events)[-1]
        status = {"state": "running", "time": time.time() + 15, "host": socket.gethostname()}
        (tmp_path / "status.json").write_text(json.dumps(status))
        wait_until(lambda: talk.state(tmp_path)["loaded"] is None)
        [refused] = talk.answer(REQUEST)
        assert "trains on this machine" in refused["error"]
        beside = list(talk.answer({**REQUEST, "beside": True}))
        assert beside[1]["opened"]["device"] == "cpu" and "end" in beside[-1]
