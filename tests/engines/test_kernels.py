"""The GPU kernels by Triton's interpreter, on the CPU: each case of kernels_interpreted.py agrees with plain
torch. The interpreter is chosen when Triton is imported, hence the process of its own.
"""

import pytest

from tests.support.kernels import agreeing


def test_kernels_agree_with_plain_torch():
    assert agreeing("engines") == 20


@pytest.mark.slow
def test_every_architecture_is_read_as_blocks_that_agree():
    assert agreeing("engines", "more") == 9
