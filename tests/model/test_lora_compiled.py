"""A kernel of LoRA as a Hopper GPU has it, compiled without one."""

import re

import pytest

from tests.support.hopper import SHARED_BYTES, compiled
from whetstone.model import gated_lora, lora_products

BYTES = {"bf16": 2, "fp32": 4}


@pytest.mark.parametrize(
    ("gated", "rank", "dtype"),
    [
        (False, 16, "bf16"),
        (False, lora_products.MAX_RANK, "bf16"),
        (False, lora_products.MAX_RANK, "fp32"),
        (True, gated_lora.MAX_RANK, "fp32"),
    ],
)
def test_it_fits_and_no_product_reads_what_is_overwritten(gated: bool, rank: int, dtype: str) -> None:
    """A product with pending ones reads a buffer while the next load writes; Triton gives it one too few."""
    pytest.importorskip("triton")
    from whetstone.model.lora_kernels import _inner_kernel, inner_sizes

    sizes = inner_sizes(rank, BYTES[dtype], gated=gated)
    program = compiled(_inner_kernel, {**sizes, "GATED": gated}, dtype)
    assert program.metadata.shared <= SHARED_BYTES
    loads_ahead = "async_copy_global_to_local" in program.asm["ttgir"]
    assert loads_ahead == (sizes["num_stages"] > 1)
    assert not re.search(r"pendings = [1-9]", program.asm["ttgir"])
