"""Where something was measured, and with what."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_DRIVER = Path("/sys/module/nvidia/version")


def machine_name(device: torch.device) -> str:
    """All GPUs that torch sees, or the processor."""
    is_cuda = device.type == "cuda"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if is_cuda else []
    return ", ".join(names) or platform.processor() or platform.machine()


def driver_version() -> str:
    """Of NVIDIA's driver; empty without one."""
    return _DRIVER.read_text().strip() if _DRIVER.is_file() else ""


def installed(*wheels: str) -> str:
    """Those that are installed, each with its version."""
    found = []
    for wheel in wheels:
        try:
            found.append(f"{wheel} {version(wheel)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
