"""Every error that treeopt raises on purpose.

The text of each puts its subject in backticks and says what is wrong, the value, and what to do::

    TreeoptError
    ├── TreeError           a tree that is not one: missing parent, duplicate, bad rank
    ├── AcceptanceError     rates or counts that cannot be accuracies
    ├── TraceError          ranks, offsets or metadata that do not fit together
    ├── ConstraintError     constraints that contradict each other or leave no tree
    ├── LatencyError        times of a machine that make no curve
    ├── DocumentError       a JSON file that breaks its schema
    ├── EngineError         a tree that a decoder cannot take, or a file of its form that cannot be read
    ├── PromptError         a prompt file with a bad line
    ├── HeadsError          a checkpoint with missing, extra or mis-shaped tensors
    ├── PictureError        a picture that cannot be drawn or written
    ├── TargetError         a model that cannot be fetched, loaded or verified
    ├── OtherProcessError   the end of a process because another one failed, which says why
    └── MissingExtraError   a command that needs an optional dependency
"""

from __future__ import annotations

import importlib.util

__all__ = [
    "AcceptanceError",
    "ConstraintError",
    "DocumentError",
    "EngineError",
    "HeadsError",
    "LatencyError",
    "MissingExtraError",
    "OtherProcessError",
    "PictureError",
    "PromptError",
    "TargetError",
    "TraceError",
    "TreeError",
    "TreeoptError",
    "first_line",
    "require_module",
]


class TreeoptError(Exception):
    """Base class: catching it catches every error that treeopt raises on purpose."""


class TreeError(TreeoptError):
    """A set of paths or parents that does not describe a draft tree."""


class AcceptanceError(TreeoptError):
    """Rates or counts that cannot be per-head accuracies."""


class TraceError(TreeoptError):
    """Ranks, document offsets or metadata of a trace that do not fit together."""


class ConstraintError(TreeoptError):
    """Constraints of a search that contradict each other or leave no tree."""


class LatencyError(TreeoptError):
    """Measured times that do not make a latency curve."""


class DocumentError(TreeoptError):
    """A JSON file that breaks its schema."""


class EngineError(TreeoptError):
    """A tree that another decoder cannot take, or a file of another decoder's that cannot be read."""


class PromptError(TreeoptError):
    """A prompt file with a line that cannot be read."""


class PictureError(TreeoptError):
    """A picture that cannot be drawn from what is given, or not in the form asked for."""


class HeadsError(TreeoptError):
    """A head checkpoint that does not fit its target or is incomplete."""


class TargetError(TreeoptError):
    """A target model that cannot be fetched, loaded or verified with a tree."""


class OtherProcessError(TreeoptError):
    """The end of one process of a run because another one failed; that one says why."""


class MissingExtraError(TreeoptError):
    """A command that needs an optional dependency which is not installed."""

    def __init__(self, command: str, missing: str, extra: str = "torch") -> None:
        super().__init__(f"`{command}` needs `{missing}`, which is not installed: pip install 'treeopt[{extra}]'")


def require_module(command: str, module: str, extra: str) -> None:
    """Raise MissingExtraError, which names the pip command, unless an optional dependency is installed."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(command, module, extra)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its kind where it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
