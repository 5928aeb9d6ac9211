"""SGLang's native interface for tests/support/protocol_server.py: requests, replies and errors as in its
sources. `is_newest`: 0.5.23; else 0.5.16.

Fields that a request of ours may have are in classes with SGLang's names; tests/engines/test_sglang_source.py
compares them with SGLang's own. Unlike SGLang, unknown fields and unknown weights are refused.
"""

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tests.support.engines import trainer_logprobs
from whetstone.engines.base import SamplingParams as OurParams
from whetstone.parallel import external_group
from whetstone.types import Finish

if TYPE_CHECKING:
    from tests.support.protocol_server import ModelServer

Answer = tuple[int, Any]
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued."
)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class GenerateReqInput(Body):
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    lora_path: str | None = None


class SamplingParams(Body):
    """The bounds are those of its `verify`."""

    max_new_tokens: int | None = Field(default=128, ge=0)
    stop_token_ids: list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=1 << 30, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


class UpdateWeightFromDiskReqInput(Body):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateWeightsFromDistributedReqInput(Body):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True


class UpdateWeightsFromTensorReqInput(Body):
    serialized_named_tensors: list[str]
    flush_cache: bool = True


class InitWeightsUpdateGroupReqInput(Body):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class UpdateWeightVersionReqInput(Body):
    new_version: str
    abort_all_requests: bool = True


class AbortReq(Body):
    abort_all: bool = False


class ReleaseMemoryOccupationReqInput(Body):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqInput(Body):
    tags: list[str] | None = None


class LoadLoRAAdapterReqInput(Body):
    lora_name: str
    lora_path: str


class UnloadLoRAAdapterReqInput(Body):
    lora_name: str


class BeginWeightUpdateReqInput(Body): ...


class EndWeightUpdateReqInput(Body): ...


def sglang(model: "ModelServer", path: str, body: Any, query: dict[str, list[str]]) -> Answer:
    handle = ROUTES.get(path)
    if handle is None or (path.endswith("_weight_update") and not model.is_newest):
        return 404, {"detail": "Not Found"}
    request_class, function = handle
    try:
        request = request_class.model_validate(body) if request_class else query
        return function(model, request)
    except ValidationError as error:
        return _refusal(str(error))
    except Refused as error:
        return 400, {"error": {"message": str(error)}}


class Refused(Exception):
    """SGLang's ValueError."""


def _refusal(message: str) -> Answer:
    """Of a body that its classes do not take."""
    return 400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


def _health(model: "ModelServer", _: Any) -> Answer:
    if model.asleep:
        model.crash("it samples a token with memory that is released")
    return 200, ""


def _server_info(model: "ModelServer", _: Any) -> Answer:
    lengths = {"context_length": model.context_length}
    return 200, {"tp_size": 1, "enable_memory_saver": True, "enable_weights_cpu_backup": True, **lengths}


def _loads(model: "ModelServer", _: Any) -> Answer:
    return 200, {"loads": [{"num_running_reqs": model.num_in_flight, "num_waiting_reqs": 0}]}


def _flush(model: "ModelServer", query: dict[str, list[str]]) -> Answer:
    ends = time.monotonic() + float(query.get("timeout", ["0"])[0])
    while model.num_in_flight and time.monotonic() < ends:
        time.sleep(0.01)
    return (400, "Timed out waiting for idle state.") if model.num_in_flight else (200, "Cache flushed.\n")


def _abort(model: "ModelServer", request: AbortReq) -> Answer:
    model.num_aborts += request.abort_all
    return 200, ""


def _updated(model: "ModelServer", flush_cache: bool) -> Answer:
    if flush_cache and model.num_in_flight:
        if not model.is_newest:
            model.crash("Cache flush failed after updating weights")
        return 400, {"success": False, "message": NOT_FLUSHED}
    return 200, {"success": True, "message": ""}


def _from_disk(model: "ModelServer", request: UpdateWeightFromDiskReqInput) -> Answer:
    try:
        model.load_folder(request.model_path)
    except (RuntimeError, ValueError, OSError) as error:
        message = f"Failed to update weights: {error}.\nRolling back to original weights."
        return 400, {"success": False, "message": message, "num_paused_requests": 0}
    model.label = request.weight_version or model.label
    return _updated(model, request.flush_cache)


def _join(model: "ModelServer", request: InitWeightsUpdateGroupReqInput) -> Answer:
    model.groups[request.group_name] = external_group.join(
        request.master_address,
        request.master_port,
        rank=request.rank_offset,
        world_size=request.world_size,
        name=request.group_name,
        backend=request.backend,
    )
    return 200, {"success": True, "message": ""}


def _from_group(model: "ModelServer", request: UpdateWeightsFromDistributedReqInput) -> Answer:
    if model.is_newest and not model.has_session:
        return 400, {"success": False, "message": "must run between begin_weight_update() and end"}
    shapes = zip(request.dtypes, request.shapes, strict=True)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in shapes]
    external_group.broadcast(tensors, model.groups[request.group_name])
    model.load_tensors(dict(zip(request.names, tensors, strict=True)))
    model.pushes.append("distributed")
    return _updated(model, request.flush_cache)


def _begin(model: "ModelServer", _: Any) -> Answer:
    return _set_session(model, True)


def _end(model: "ModelServer", _: Any) -> Answer:
    return _set_session(model, False)


def _set_session(model: "ModelServer", opens: bool) -> Answer:
    if model.has_session == opens:
        return 400, {"success": False, "message": "a weight-update session is open already, or none is"}
    model.has_session = opens
    return 200, {"success": True, "message": "Success"}


def _label(model: "ModelServer", request: UpdateWeightVersionReqInput) -> Answer:
    model.num_aborts += request.abort_all_requests
    model.label = request.new_version
    return 200, {"success": True, "message": "", "new_version": request.new_version}


def _load_adapter(model: "ModelServer", request: LoadLoRAAdapterReqInput) -> Answer:
    if request.lora_name in model.policies:
        return 400, {"success": False, "error_message": "it is already loaded", "loaded_adapters": None}
    model.load_adapter(request.lora_name, request.lora_path)
    return 200, {"success": True, "error_message": None, "loaded_adapters": {}}


def _unload_adapter(model: "ModelServer", request: UnloadLoRAAdapterReqInput) -> Answer:
    if request.lora_name in model.left and not model.is_newest:
        threading.Event().wait(3600)  # a request whose client has left is counted for ever
    del model.policies[request.lora_name]
    return 200, {"success": True, "error_message": None, "loaded_adapters": {}}


def _release(model: "ModelServer", request: ReleaseMemoryOccupationReqInput) -> Answer:
    if model.num_in_flight:
        model.crash("release_memory_occupation should be called only when server is idle.")
    model.asleep |= set(request.tags or ["weights", "kv_cache"])
    return 200, None


def _resume(model: "ModelServer", request: ResumeMemoryOccupationReqInput) -> Answer:
    if not set(request.tags or []) <= model.asleep:
        model.crash("KeyError")
    model.asleep -= set(request.tags or [])
    return 200, None


def _generate(model: "ModelServer", request: GenerateReqInput) -> Answer:
    try:
        params = SamplingParams.model_validate(request.sampling_params)
    except ValidationError as error:
        raise Refused(str(error)) from None
    if params.top_k == 0:
        raise Refused("top_k must be -1 (disable) or at least 1, got 0.")
    if request.lora_path is not None and request.lora_path not in model.policies:
        raise Refused(f"Got LoRA adapter that has never been loaded: {request.lora_path}")
    sampling = OurParams(
        max_tokens=_limit(model, len(request.input_ids), params.max_new_tokens),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        ignore_eos=params.ignore_eos,  # it is looked at before `stop_token_ids`
    )
    version, name = model.label, request.lora_path or "policy"
    done = model.sample(name, request.input_ids, params.sampling_seed or 0, sampling)
    if done is None:
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        meta = {"output_token_logprobs": [], "finish_reason": reason, "weight_version": version}
        return 200, {"text": "", "output_ids": [], "meta_info": meta}
    logprobs = list(done.logprobs)
    if sampling.is_filtered:  # it gives those of all tokens
        with model.lock, torch.no_grad():
            prompt = tuple(request.input_ids)
            logprobs = trainer_logprobs(model.policies[name], prompt, done, sampling.temperature).tolist()
    pairs = [[p, token, None] for p, token in zip(logprobs, done.token_ids, strict=True)]
    is_full = len(done.token_ids) == sampling.max_tokens
    if done.finish is Finish.LENGTH or (is_full and not model.is_newest):
        reason = {"type": "length", "length": sampling.max_tokens}
    else:
        reason = {"type": "stop", "matched": done.token_ids[-1]}
    meta = {"output_token_logprobs": pairs, "finish_reason": reason, "weight_version": version}
    answer = {"text": "", "output_ids": list(done.token_ids), "meta_info": meta}
    return 200, answer if model.spoil is None else model.spoil(answer)


def _limit(model: "ModelServer", num_prompt: int, wanted: int | None) -> int:
    """The longest completion: it leaves two tokens of its context length empty, and says nothing."""
    context = model.context_length or model.base.config.max_position_embeddings
    wanted = 128 if wanted is None else wanted
    if num_prompt + wanted > context:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens."
        )
    if num_prompt >= context - 6:
        raise Refused(f"Input length ({num_prompt} tokens) exceeds the maximum allowed length.")
    return min(wanted, context - 1 - num_prompt - 1)


ROUTES: dict[str, tuple[type[Body] | None, Any]] = {
    "/health": (None, _health),
    "/server_info": (None, _server_info),
    "/model_info": (None, lambda model, _: (200, {"weight_version": model.label})),
    "/v1/loads": (None, _loads),
    "/flush_cache": (None, _flush),
    "/abort_request": (AbortReq, _abort),
    "/generate": (GenerateReqInput, _generate),
    "/update_weights_from_disk": (UpdateWeightFromDiskReqInput, _from_disk),
    "/init_weights_update_group": (InitWeightsUpdateGroupReqInput, _join),
    "/update_weights_from_distributed": (UpdateWeightsFromDistributedReqInput, _from_group),
    "/begin_weight_update": (BeginWeightUpdateReqInput, _begin),
    "/end_weight_update": (EndWeightUpdateReqInput, _end),
    "/update_weight_version": (UpdateWeightVersionReqInput, _label),
    "/load_lora_adapter": (LoadLoRAAdapterReqInput, _load_adapter),
    "/unload_lora_adapter": (UnloadLoRAAdapterReqInput, _unload_adapter),
    "/release_memory_occupation": (ReleaseMemoryOccupationReqInput, _release),
    "/resume_memory_occupation": (ResumeMemoryOccupationReqInput, _resume),
}
