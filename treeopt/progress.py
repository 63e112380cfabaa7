"""Progress of long work on stderr: documents, tokens a second, time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

__all__ = ["Progress"]

TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 30.0  # seconds between two drawings


class Progress:
    """A bar that counts documents and shows tokens a second.

    Parameters
    ----------
    label : str
    total : int
        Documents in all.
    done : int
        Documents that an earlier run finished; they fill the bar but do not count for the speed.
    unit : str
        What is counted.
    """

    def __init__(self, label: str, *, total: int, done: int = 0, unit: str = "documents") -> None:
        interval = TERMINAL_INTERVAL if sys.stderr.isatty() else LOG_INTERVAL
        self._bar: Any = tqdm(
            desc=label, total=total, initial=done, unit=f" {unit}", mininterval=interval, maxinterval=interval
        )
        self._tokens = 0
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, *, documents: int = 0, tokens: int = 0, note: str = "") -> None:
        """Count finished documents and tokens; `note` stands at the end of the line."""
        self._tokens += tokens
        speed = f"{self._tokens / max(time.monotonic() - self._start, 1e-9):.0f} tokens/s" if self._tokens else ""
        self._bar.set_postfix_str(", ".join(filter(None, (speed, note))), refresh=False)
        self._bar.update(documents)
