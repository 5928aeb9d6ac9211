"""NVIDIA GPUs and their driver without torch: from /proc, /sys, libcuda and nvidia-smi. Never raises."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

DRIVER_FOLDER = Path("/proc/driver/nvidia")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"  # the first byte of the PCI class of display and 3D controllers
MIN_DRIVERS = {11: "450", 12: "525", 13: "580"}  # major version of CUDA -> the first driver that runs it


def present_gpus() -> list[str]:
    """A name for each NVIDIA GPU of this machine, whether or not torch can use it."""
    models = []
    for file in sorted(DRIVER_FOLDER.glob("gpus/*/information")):
        match = re.search(r"^Model:\s*(.+)$", _read(file), re.MULTILINE)
        models.append(match[1].strip() if match else "NVIDIA GPU")
    if models:
        return models
    listed = re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", nvidia_smi("-L"), re.MULTILINE)
    if listed:
        return listed
    devices = [(_read(folder / "vendor"), _read(folder / "class")) for folder in PCI_DEVICES.glob("*")]
    return [
        "NVIDIA GPU"
        for vendor, kind in devices
        if vendor.strip() == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASS)
    ]


def driver_version() -> str | None:
    """`570.86.15`; None without a driver."""
    match = re.search(r"\s(\d{3}\.\d+(?:\.\d+)*)\s", _read(DRIVER_FOLDER / "version"))
    if match:
        return match[1]
    lines = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    return lines[0] if lines and re.fullmatch(r"[\d.]+", lines[0]) else None


def driver_cuda() -> tuple[int, int] | None:
    """The newest version of CUDA that the driver supports; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def processes(uuid: str) -> list[str]:
    """`4711 python 12.3 GB` for each process on a GPU, as far as this user and container see them."""
    query = ("-i", uuid, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    lines = [[field.strip() for field in line.split(",")] for line in nvidia_smi(*query).splitlines()]
    return [
        f"{pid} {Path(name).name} {int(memory) / 1024:.1f} GB"
        for pid, name, memory in (line for line in lines if len(line) == 3)
        if memory.isdigit()
    ]


def nvidia_smi(*arguments: str) -> str:
    """Its output; empty where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
