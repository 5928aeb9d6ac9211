"""Our requests to SGLang against its own source text, which is not imported: that needs CUDA.

SGLANG_SOURCE names a folder with the package, such as an unpacked wheel of 0.5.16 or 0.5.23.
"""

import ast
import os
import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support import sglang_protocol
from whetstone.config import load
from whetstone.engines.servers.setup import COMMANDS

SOURCE = Path(os.environ.get("SGLANG_SOURCE", "")) / "sglang" / "srt"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE.is_dir(), reason="SGLANG_SOURCE names no folder with the package sglang"),
]
BODIES = [one for one in sglang_protocol.Body.__subclasses__() if one.__name__[0] != "_"]


@cache
def classes(file: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fields(name: str) -> dict[str, ast.AnnAssign]:
    file = "sampling/sampling_params.py" if name == "SamplingParams" else "managers/io_struct.py"
    body = classes(file)[name].body
    return {node.target.id: node for node in body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_fields_are_those_of_sglang(body: type[sglang_protocol.Body]) -> None:
    if body.__name__ not in classes("managers/io_struct.py") and body.__name__ != "SamplingParams":
        assert body.__name__ in ("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput")  # not in 0.5.16
        return
    theirs = fields(body.__name__)
    for name, ours in body.model_fields.items():
        assert name in theirs, f"{body.__name__}.{name}"
        if ours.is_required():
            continue
        default = theirs[name].value
        assert default is not None, f"{body.__name__}.{name} is required there"
        if isinstance(default, ast.Constant):
            assert default.value == ours.default
    required = {name for name, node in theirs.items() if node.value is None}
    assert required <= {name for name, ours in body.model_fields.items() if ours.is_required()}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_types_are_those_of_sglang(body: type[sglang_protocol.Body]) -> None:
    names = {**vars(typing), "Base64Bytes": lambda: None, "bytes": str}  # JSON has no bytes
    for name, node in (fields(body.__name__) if body.__name__ in GIVEN else {}).items():
        if name in body.model_fields:
            theirs = eval(compile(ast.Expression(node.annotation), "sglang", "eval"), dict(names))
            ours: Any = body.model_fields[name].annotation
            expected = TypeAdapter(theirs).json_schema()
            schema = TypeAdapter(ours).json_schema()
            if name == "stop_token_ids":  # a set there
                expected["anyOf"][0].pop("uniqueItems")
            assert schema == expected, f"{body.__name__}.{name}"


GIVEN = {one.__name__ for one in BODIES} - {
    "GenerateReqInput",  # one prompt or several
    "BeginWeightUpdateReqInput",
    "EndWeightUpdateReqInput",
}


def test_the_endpoints_exist() -> None:
    files = [SOURCE / "entrypoints" / "http_server.py", SOURCE / "entrypoints" / "v1_loads.py"]
    server = "".join(file.read_text(encoding="utf-8") for file in files)
    for path in sglang_protocol.ROUTES:
        assert f'"{path}"' in server or path in ("/begin_weight_update", "/end_weight_update")


def test_the_flags_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = "rollout_engine=sglang use_peft=true max_prompt_length=9"
    command = COMMANDS["sglang"](load(None, words.split()).config, devices=None, host="h", port=1)
    files = [SOURCE / "server_args.py", *SOURCE.glob("arg_groups/fields/*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    flags = [word for word in command.args if word.startswith("--")]
    assert "--lora-target-modules" in flags
    for flag in flags:
        assert f"    {flag[2:].replace('-', '_')}: A[" in text, flag
    names = (SOURCE / "environ.py").read_text(encoding="utf-8")
    assert all(name in names for name in command.environment)
