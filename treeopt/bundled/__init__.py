"""Data that ships with the package: the repository's calibration/ and trees/ folders."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["DEMO_HEADS", "DEMO_PROMPTS", "DEMO_TRACE", "calibration_path"]

DEMO_HEADS = "heads/demo"
DEMO_PROMPTS = "prompts/chat.jsonl"
DEMO_TRACE = "traces/demo.safetensors"


def calibration_path(name: str) -> Path:
    """Return the path of a file or folder of calibration/."""
    return Path(str(resources.files("treeopt.bundled.calibration"))) / name
