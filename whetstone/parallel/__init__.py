"""Ranks, collectives, FSDP, tensor parallelism. torch.distributed is used here and in run/checkpoint only."""
