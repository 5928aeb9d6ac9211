"""The section of speed measurement. It does not affect training."""

from pydantic import Field

from whetstone.config.base import Section


class MeasurementConfig(Section):
    """What the device could do, for those that this package does not know."""

    peak_tflops: float | None = Field(default=None, gt=0, le=1_000_000)
    """Dense bf16 TFLOP/s of one device: what the metric `mfu` is a share of. Default: the data sheet's, by
    the device's name; where that is not known (a CPU) there is no `mfu` unless you say.
    """
