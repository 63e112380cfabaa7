"""Finished documents on disk: what an interrupted run goes on from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from treeopt import strictjson
from treeopt.errors import TraceError

__all__ = ["DocumentStore"]


class DocumentStore:
    """JSON lines: a header that says how the documents are made, then one line per finished document.

    A line is on disk before `append` returns. A last line that an interruption left unfinished is cut off on opening.

    Parameters
    ----------
    path : Path
    header : dict
        Must equal the header of an existing file.

    Raises
    ------
    TraceError
        If the file was made with other settings, or is damaged.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.done: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf8")
        try:
            self._lock()
            if not self._read():
                self._write(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> DocumentStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, document: str, value: Any) -> None:
        """Keep the result of a document."""
        self.done[document] = value
        self._write({"id": document, "value": value})

    def _lock(self) -> None:
        """Refuse a second run beside the first: each would take the other's unfinished line for a torn one."""
        if sys.platform == "win32":  # it has no such lock; two runs on one output are for the user to avoid there
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TraceError(
                f"`{self.path}` is being written by another run; wait for it or choose another -o"
            ) from error

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> bool:
        """Read the documents; return False if not even the header is whole."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            return False
        try:
            found, *rows = map(strictjson.parse, lines)
            self.done = {row["id"]: row["value"] for row in rows}
            if not isinstance(found, dict) or not all(isinstance(value, list) for value in self.done.values()):
                raise ValueError("a line has another form")
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"`{self.path}` is damaged ({error}); delete it to start anew") from error
        if found != self.header:
            differing = sorted(key for key in self.header if found.get(key) != self.header[key])
            raise TraceError(
                f"`{self.path}` was left by a run with another {', '.join(differing)}; delete it to start anew, "
                "or go on with the settings it was made with"
            )
        return True
