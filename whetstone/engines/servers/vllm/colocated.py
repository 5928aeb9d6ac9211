"""vLLM inside the trainer's process, on one GPU; it sleeps during the update. On a CPU it stays awake."""

import os
from collections.abc import Iterator
from typing import Any

from whetstone.config import Config
from whetstone.engines.base import EngineBase, GenerationOutput, Request, SamplingParams
from whetstone.engines.servers import settings
from whetstone.engines.servers.client import InvalidReply, SleepMixin, parse_reply
from whetstone.engines.servers.process import error_lines
from whetstone.engines.servers.weights import WeightFolders, named_weights
from whetstone.errors import UserError
from whetstone.model.policy import Policy


class ColocatedVLLM(SleepMixin, EngineBase):
    def __init__(self, config: Config, policy: Policy):
        super().__init__(policy)
        settings.require_package("vllm", "vllm_mode: colocate")
        if config.engines.server_tensor_parallel_size > 1:
            raise UserError(
                "vllm_mode: colocate uses one GPU: set server_tensor_parallel_size: 1, or vllm_mode: server."
            )
        self.adapter: Any = None  # vLLM's request for the newest LoRA adapter
        self.num_requests = 0
        on_gpu = policy.device.type == "cuda"
        can_sleep = on_gpu and config.engines.server_enable_sleep_mode
        self.can_release = ["weights", "kv_cache"] if can_sleep else []
        self.folders = WeightFolders(config.engines.weight_transfer_dir) if policy.is_lora else None
        # In this very process, so that tensors are handed over as they are.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        self.llm = _make(config, policy, on_gpu, can_sleep)

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        from vllm.inputs import TokensPrompt  # type: ignore

        engine, waiting = self.llm.llm_engine, {}
        for r, request in enumerate(requests):
            for s, seed in enumerate(request.seeds):
                name = f"whetstone-{self.num_requests}"
                self.num_requests += 1
                prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
                params = request.sample_params(s, sampling)
                engine.add_request(name, prompt, self._params(params, seed), lora_request=self.adapter)
                waiting[name] = (r, s)
        try:
            while waiting:
                for output in engine.step():
                    if output.finished:
                        yield self._completed(output, waiting.pop(output.request_id), sampling)
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def _params(self, sampling: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams  # type: ignore
        from vllm.sampling_params import RequestOutputKind  # type: ignore

        return VLLMSamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop_token_ids=sampling.stop_ids(self.policy.stop_token_ids),
            ignore_eos=True,  # the stop tokens are named
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completed(self, output: Any, job: tuple[int, int], sampling: SamplingParams) -> GenerationOutput:
        (sequence,) = output.outputs
        token_ids = list(sequence.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, sequence.logprobs, strict=True)]
        stops, finish = self.policy.stop_token_ids, sequence.finish_reason
        try:
            reply = parse_reply(
                token_ids, logprobs, finish, weight_version=None, sampling=sampling, stops=stops
            )
        except InvalidReply as error:
            raise UserError(f"vLLM answered a request for a completion with {error}.") from None
        return self.output(*job, reply.token_ids, reply.logprobs, reply.finish)

    def update_weights(self, policy_version: int) -> None:
        self._wake("weights")
        if self.folders is not None:
            self._load_adapter(policy_version)
        else:
            weights = {"weights_iterator": named_weights(self.policy)}
            self.llm.collective_rpc("reload_weights", kwargs=weights)
        self.llm.reset_prefix_cache()  # what is cached was computed with the old weights
        super().update_weights(policy_version)

    def _load_adapter(self, policy_version: int) -> None:
        from vllm.lora.request import LoRARequest  # type: ignore

        assert self.folders is not None
        before = self.adapter
        number = 1 if before is None else before.lora_int_id + 1
        folder = self.folders.write(self.policy, f"{number}-{policy_version}")
        self.adapter = LoRARequest(f"policy-{number}", number, str(folder))
        self.llm.llm_engine.add_lora(self.adapter)  # read now: the folder will not stay
        if before is not None:
            self.llm.llm_engine.remove_lora(before.lora_int_id)
        self.folders.keep_only(folder)

    def _release(self) -> None:
        self.llm.sleep(level=1)  # weights are offloaded to the CPU, the cache is discarded

    def _resume(self, tag: str) -> None:
        self.llm.wake_up(tags=[tag])

    def close(self) -> None:
        if self.folders is not None:
            self.folders.close()
        self.llm.llm_engine.engine_core.shutdown()


def _make(config: Config, policy: Policy, on_gpu: bool, can_sleep: bool) -> Any:
    from vllm import LLM  # type: ignore

    options: dict[str, Any] = {
        "model": settings.model_folder(config),
        "dtype": str(policy.lm.dtype).removeprefix("torch."),
        "max_num_seqs": settings.max_slots(config),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "seed": config.run.seed % 2**32,
        "disable_log_stats": True,
    }
    if (length := settings.max_model_length(config)) is not None:
        options["max_model_len"] = length
    if config.model.use_peft:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": settings.lora_rank(config)}
    if on_gpu:
        options["gpu_memory_utilization"] = settings.memory_fraction(config, alone=False)
        options["enable_sleep_mode"] = can_sleep
    else:
        options["enforce_eager"] = True
    try:
        return LLM(**options)
    except (ValueError, RuntimeError) as error:
        reason = error_lines(str(error) or type(error).__name__)
        raise UserError(
            f"vLLM could not start in this process ({reason}): lower server_gpu_memory_utilization or "
            "server_max_model_length, or set rollout_engine: native."
        ) from None
