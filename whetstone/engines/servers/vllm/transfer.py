"""Weights over vLLM's weight transfer: NCCL between GPUs, CUDA IPC on one GPU, in buckets.

Tensors of a bucket are sent one by one, since the `packed` option differs between versions; without it 0.22
to 0.32 have the same interface. Needs vLLM in the trainer's process for its NCCL communicator.
"""

import base64
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whetstone.engines.servers.http import PUSH_TIMEOUT_S, HttpClient, Unreachable, free_port, own_address
from whetstone.engines.servers.settings import require_package
from whetstone.engines.servers.weights import BUCKET_BYTES, WeightUpdate, buckets, describe, named_weights
from whetstone.errors import UserError


@dataclass
class NCCLTransfer:
    """The trainer is rank 0 of a group with the workers of one server."""

    http: HttpClient
    port: int | None
    group: Any = None

    def send(self, update: WeightUpdate) -> None:
        device = update.policy.device
        if device.type != "cuda":
            raise UserError("weight_transfer: nccl needs the trainer on a GPU: set weight_transfer: disk.")
        with torch.cuda.device(device):  # a thread begins on the first GPU, wherever the trainer is
            if self.group is None:
                self._join(device)
            _session(self.http, update, self._send_bucket)

    def _join(self, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # type: ignore
        from vllm.distributed.utils import StatelessProcessGroup  # type: ignore

        workers = self.http.get("/get_world_size")["world_size"]
        address, port = own_address(self.http.host), self.port or free_port()
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": workers + 1}
        with self.http.posting("/init_weight_transfer_engine", {"init_info": info}):
            try:
                store = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=workers + 1)
                self.group = PyNcclCommunicator(store, device=device)
            except RuntimeError as error:
                self.http.cancel_all()  # it may wait for us for ever
                raise UserError(
                    f"NCCL could not connect the trainer with {self.http.url} ({error}): they need GPUs of "
                    "their own (server_devices); on one GPU set weight_transfer: ipc or disk."
                ) from None

    def _send_bucket(self, bucket: list[tuple[str, Tensor]]) -> None:
        with self.http.posting("/update_weights", _update_info(bucket)):
            for _, tensor in bucket:
                self.group.broadcast(tensor.contiguous(), src=0, stream=torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()


@dataclass
class IPCTransfer:
    """The server's process opens the trainer's memory: nothing is copied between processes."""

    http: HttpClient
    is_ready: bool = False

    def send(self, update: WeightUpdate) -> None:
        if update.policy.device.type != "cuda":
            raise UserError("weight_transfer: ipc needs the trainer on a GPU: set weight_transfer: disk.")
        if not self.is_ready:
            self.http.post("/init_weight_transfer_engine", {"init_info": {}})
            self.is_ready = True
        self.gpu = str(torch.cuda.get_device_properties(update.policy.device).uuid)
        with torch.cuda.device(update.policy.device):
            torch.cuda.synchronize()  # the other process does not wait for our stream
            _session(self.http, update, self._send_bucket)

    def _send_bucket(self, bucket: list[tuple[str, Tensor]]) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        tensors = [(name, tensor.contiguous()) for name, tensor in bucket]  # alive until the answer
        handles = [{self.gpu: reduce_tensor(tensor)[1]} for _, tensor in tensors]
        pickled = base64.b64encode(pickle.dumps(handles)).decode("ascii")
        body = _update_info(tensors, ipc_handles_pickled=pickled)
        self.http.post("/update_weights", body, PUSH_TIMEOUT_S)
        torch.cuda.ipc_collect()


Transfer = NCCLTransfer | IPCTransfer


def make_transfer(method: str, http: HttpClient, port: int | None) -> Transfer | None:
    """A new one for each start of a server; None for weights that go by file."""
    if method == "disk":
        return None
    require_package("vllm", f"weight_transfer: {method}")
    return NCCLTransfer(http, port) if method == "nccl" else IPCTransfer(http)


def _session(
    http: HttpClient, update: WeightUpdate, send_bucket: Callable[[list[tuple[str, Tensor]]], None]
) -> None:
    """Start, buckets, finish. After a failure the server has no weights and is not used until it restarts."""
    http.post("/start_weight_update", {})
    try:
        for bucket in buckets(named_weights(update.policy), BUCKET_BYTES):
            send_bucket(bucket)
        http.post("/finish_weight_update", {"weight_version": update.version}, timeout_s=PUSH_TIMEOUT_S)
    except RuntimeError as error:  # NCCL and CUDA speak this way
        raise Unreachable(f"the transfer of the weights broke off ({error})") from None


def _update_info(bucket: list[tuple[str, Tensor]], **more: str) -> dict[str, Any]:
    names, dtypes, shapes = describe(bucket)
    return {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes, **more}}
