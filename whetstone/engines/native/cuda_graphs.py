"""The decode step and the sampling as CUDA graphs."""

import torch

from whetstone.engines.native.decode_step import Step
from whetstone.engines.native.slot_state import PagedState

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


class CudaGraphs:
    """The decode step as CUDA graphs, one per batch-size bucket and sampling mode, captured on first use.

    A graph reads weights, state and settings at fixed addresses, so it stays valid while they change in
    place. Capture runs the step on empty rows, which changes no sequence.
    """

    def __init__(self, step: Step, state: PagedState):
        self.step, self.state = step, state
        self.captured: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def get(self, num_rows: int, *, greedy: bool, filtered: bool) -> tuple[torch.cuda.CUDAGraph, int]:
        """The graph for `num_rows` rows, and its number of rows."""
        bucket = min([bucket for bucket in BUCKETS if bucket >= num_rows] + [self.state.num_slots])
        key = (bucket, greedy, filtered)
        if key not in self.captured:
            self.captured[key] = self._capture(*key)
        return self.captured[key], bucket

    def _capture(self, bucket: int, greedy: bool, filtered: bool) -> torch.cuda.CUDAGraph:
        from whetstone.engines.native.kernels.sample import sample

        def run() -> None:
            rows = self.state.rows[:bucket]
            sample(self.step(self.state, rows), self.state, rows, greedy=greedy, filtered=filtered)

        self.state.rows.fill_(-1)
        run()  # kernels are compiled and libraries loaded outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile (an asynchronous update).
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            run()
        return graph
