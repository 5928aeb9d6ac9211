"""Triton kernels as a Hopper GPU has them, compiled without one."""

from typing import Any

import pytest

SHARED_BYTES = 232_448  # of one program
TYPES = {"tiles_ptr": "*i32", "items_ptr": "*i32"}
TYPES |= dict.fromkeys(("lse_ptr", "delta_ptr", "parts_ptr"), "*fp32")
TYPES |= dict.fromkeys(("scale", "factor"), "fp32")
UNALIGNED = {"num_rows", "heads", "scale", "factor"}


def compiled(kernel: Any, constants: dict[str, Any], dtype: str = "bf16") -> Any:
    """`constants`: of the kernel, in capitals, and options of the compiler. Other pointers are to `dtype`."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {}
    for name in names:
        other = f"*{dtype}" if name.endswith("_ptr") else "i32"
        types[name] = "constexpr" if name.isupper() else TYPES.get(name, other)
    aligned = [i for i, name in enumerate(names) if not name.isupper() and name not in UNALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {name: value for name, value in constants.items() if name.islower()}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
