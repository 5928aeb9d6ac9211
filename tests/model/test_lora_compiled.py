"""A kernel of LoRA as a Hopper GPU has it, compiled without one."""

import re

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from whetstone.model import gated_lora, lora_products  # noqa: E402
from whetstone.model.lora_kernels import _inner_kernel, inner_sizes  # noqa: E402

SHARED_BYTES = 232_448  # of one program
BYTES = {"bf16": 2, "fp32": 4}
UNALIGNED = ("num_rows", "scale")


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
    names = _inner_kernel.arg_names
    sizes = inner_sizes(rank, BYTES[dtype], gated=gated)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    kinds = {name: "constexpr" if name.isupper() else "i32" for name in names} | {"scale": "fp32"}
    kinds |= {name: f"*{dtype}" for name in names if name.endswith("_ptr")}
    aligned = [i for i, name in enumerate(names) if not name.isupper() and name not in UNALIGNED]
    source = ASTSource(
        fn=_inner_kernel,
        signature=kinds,
        constexprs={(names.index(name),): size for name, size in {**sizes, "GATED": gated}.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert "async_copy_global_to_local" in compiled.asm["ttgir"]  # loads ahead of the products
    assert not re.search(r"pendings = [1-9]", compiled.asm["ttgir"])
