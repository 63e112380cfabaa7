"""What a figure was measured with."""

from __future__ import annotations

import platform
from pathlib import Path


def machine():
    """Return processor, cores and versions, for the head of a result."""
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        names = [line.split(":")[1].strip() for line in information.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
