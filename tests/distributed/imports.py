"""What every process of a distributed test needs, read once by the server that they are forked from."""

import peft  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import whetstone.train  # noqa: F401
