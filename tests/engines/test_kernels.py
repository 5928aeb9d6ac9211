"""The GPU kernels of all packages by Triton's interpreter, on the CPU: each case of a kernels_interpreted.py
agrees with plain torch. The interpreter is chosen when Triton is imported, hence the process of its own.
"""

import pytest

from tests.support.kernels import agreeing

NUM_CASES = {"engines": 22, "model": 18, "optimizer": 11}


@pytest.fixture(scope="module")
def agreed() -> dict[str, int]:
    return agreeing(*NUM_CASES)


@pytest.mark.parametrize("package", NUM_CASES)
def test_kernels_agree_with_plain_torch(agreed, package):
    assert agreed[package] == NUM_CASES[package]


@pytest.mark.slow
def test_every_architecture_is_read_as_blocks_that_agree():
    assert agreeing("engines.MORE") == {"engines.MORE": 10}
