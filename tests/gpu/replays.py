"""Kernels that begin while the one before them runs, in a graph."""

from collections.abc import Callable

import torch
from torch import Tensor


def check_replays(forward: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]) -> None:
    """`forward` changes a residual [256, 1024] in place: in twenty replays of its graph as `reference` does.
    What is read before it was written shows sometimes.
    """
    torch.manual_seed(1)
    start = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    residual = start.clone()
    forward(residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(residual)
    expected = reference(start.clone()).float()
    for _ in range(20):
        residual.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert ((residual.float() - expected).norm() / expected.norm()).item() < 1e-2
