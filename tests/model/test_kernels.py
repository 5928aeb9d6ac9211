"""The kernels of the update by Triton's interpreter, on the CPU, beside plain torch."""

from tests.support.kernels import agreeing


def test_kernels_of_the_update_agree_with_plain_torch():
    assert agreeing("model") == 7
