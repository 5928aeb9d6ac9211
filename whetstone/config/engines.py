"""The section of vLLM and SGLang. docs/servers.md has the details."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from whetstone.config.base import MAX_SECONDS, Name, Resume, Section


class EnginesConfig(Section):
    """Where servers are, how they are started, and how weights reach them."""

    resume: ClassVar = Resume.SAFE
    rollout_servers: list[Name] = Field(default_factory=list)
    """Addresses of running servers, as a list or a text with commas; empty: the run starts its own."""
    server_base_url: Name | None = None
    """TRL's way to name one server: its address."""
    server_host: Name | None = None
    """Host of one running server (TRL's way). `whet serve` listens on it; default: 127.0.0.1."""
    server_port: int = Field(default=8000, ge=1, le=65535)
    """Port of that server; the servers of `whet serve` count up from it."""
    server_timeout_s: float = Field(default=240.0, gt=0, le=MAX_SECONDS)
    """How long to wait for servers to come up, and for one to come back when none is left."""
    server_request_timeout_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    """How long until a server that owes an answer is taken for dead and its work is done elsewhere."""
    server_gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of GPU memory for the engine; default: 0.9, or 0.3 where it shares the trainer's GPU."""
    server_tensor_parallel_size: int = Field(default=1, ge=1, le=1_024)
    """GPUs that one server spreads the model over."""
    server_max_model_length: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longest prompt + completion; default: the sum of both limits, or what the model allows."""
    server_enable_sleep_mode: bool = True
    """Where the engine shares the trainer's GPU: give its memory back during the update."""
    server_group_port: int | None = Field(default=None, ge=1, le=65535)
    """First port on the trainer's machine for sending weights by NCCL; default: any free one."""
    server_devices: list[Name] = Field(default_factory=list)
    """GPUs of each server: ["4", "5"], or ["4,5", "6,7"] with tensor parallelism. Empty: one server."""
    server_python: Name | None = None
    """The interpreter that starts servers, of an environment with vLLM or SGLang; default: the trainer's."""
    server_args: list[Name] = Field(default_factory=list)
    """Further arguments for the command that starts a server, as `vllm serve` or SGLang knows them."""
    weight_transfer: Literal["auto", "nccl", "ipc", "disk"] = "auto"
    """How weights reach a server: NCCL, IPC (on the trainer's GPU) or files; auto: as it was started."""
    weight_transfer_dir: Name | None = None
    """Folder for weights sent as files (LoRA: always), with one path on all machines. Default: temporary."""
    max_logprob_difference: float = Field(default=0.1, gt=0, le=1_000)
    """The run stops when mean logprobs of engine and trainer differ by more: the weights are not the same."""

    @property
    def addresses(self) -> list[str]:
        """Servers that are running already, whichever key names them."""
        if self.rollout_servers:
            return self.rollout_servers
        if self.server_base_url is not None:
            return [self.server_base_url]
        if self.server_host is not None:
            return [f"http://{self.server_host}:{self.server_port}"]
        return []

    @field_validator("rollout_servers", mode="before")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        if value is None:
            return []
        entries = value.split(",") if isinstance(value, str) else value
        if not isinstance(entries, list):
            raise ValueError("give addresses such as http://node1:8000, as a list or separated by commas")
        return [_address(entry) for entry in entries if str(entry).strip()]

    @field_validator("server_base_url", mode="before")
    @classmethod
    def _base_url(cls, value: Any) -> Any:
        return None if value is None else _address(value)

    @field_validator("server_devices", "server_args", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        entries = [] if value is None else value if isinstance(value, list) else [value]
        return [str(entry) for entry in entries]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError("rollout_servers names a server twice: name each once")
        for devices in self.server_devices:
            if len(devices.split(",")) != self.server_tensor_parallel_size:
                raise ValueError(
                    f"server_devices gives a server the GPUs {devices}, but server_tensor_parallel_size is "
                    f"{self.server_tensor_parallel_size}: give each entry that many"
                )
        return self


def _address(value: Any) -> str:
    """`node1:8000` -> `http://node1:8000`."""
    text = str(value).strip().rstrip("/")
    return text if text.startswith(("http://", "https://")) else f"http://{text}"
