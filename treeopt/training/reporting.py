"""Where Trainer logs beside the log file."""

from __future__ import annotations

from transformers.integrations import get_reporting_integration_callbacks

from treeopt.errors import HeadsError, first_line

__all__ = ["require_reporter"]


def require_reporter(name: str) -> None:
    """Refuse a place to log to that Trainer does not know, or whose package is not there.

    Raises
    ------
    HeadsError
        With what Trainer says.
    """
    if name == "none":
        return
    try:
        for reporter in get_reporting_integration_callbacks([name]):
            reporter()
    except (ValueError, RuntimeError, ImportError) as error:
        raise HeadsError(f"`--report-to {name}` cannot be used: {first_line(error)}") from error
