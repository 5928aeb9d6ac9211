"""Data sheets of GPUs: peak rate, memory speed, memory, power and link."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """`part` of the device's name."""

    part: str
    tflops: float  # dense bf16
    gb_per_s: float
    memory_gb: float  # 10^9 bytes
    watts: float
    link_gb_per_s: float  # each way to a GPU of the same host: NVLink, or PCIe


# The first match counts, so that variants come before the plain name.
CHIPS = (
    Chip("B200", 2250.0, 8000, 192, 1000, 900),
    Chip("H200", 989.0, 4800, 141, 700, 450),
    Chip("H100 PCIe", 756.0, 2000, 80, 350, 64),
    Chip("H100 NVL", 835.0, 3900, 94, 400, 64),
    Chip("H100", 989.0, 3350, 80, 700, 450),
    Chip("H20", 148.0, 4000, 96, 400, 450),
    Chip("A100-SXM4-40GB", 312.0, 1555, 40, 400, 300),
    Chip("A100-PCIE-40GB", 312.0, 1555, 40, 250, 32),
    Chip("A100", 312.0, 2039, 80, 400, 300),
    Chip("A10", 125.0, 600, 24, 150, 32),
    Chip("A30", 165.0, 933, 24, 165, 32),
    Chip("A40", 150.0, 696, 48, 300, 32),
    Chip("L40S", 362.0, 864, 48, 350, 32),
    Chip("L40", 181.0, 864, 48, 300, 32),
    Chip("L4", 121.0, 300, 24, 72, 32),
    Chip("RTX PRO 6000", 500.0, 1792, 96, 600, 64),
    Chip("RTX A6000", 155.0, 768, 48, 300, 32),
    Chip("RTX 5090", 209.5, 1792, 32, 575, 64),
    Chip("RTX 4090", 165.2, 1008, 24, 450, 32),
    Chip("RTX 3090", 71.0, 936, 24, 350, 32),
)


def find_chip(name: str | None) -> Chip | None:
    """The chip of a device's name, or of a name that a user wrote."""
    if name is None:
        return None
    lower = name.lower()
    return next((chip for chip in CHIPS if chip.part.lower() in lower), None)
