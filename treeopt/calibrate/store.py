"""Finished documents on disk: what an interrupted run goes on from."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from treeopt import strictjson
from treeopt.errors import TraceError

__all__ = ["DocumentStore"]


@dataclass(slots=True)
class _File:
    """One process's file, and how far it has been read."""

    path: Path
    number: int
    read: int = 0


class DocumentStore(Mapping[str, list[Any]]):
    """Documents in JSON lines: a header that says how they are made, then one line per finished document.

    Every process of a run writes a file of its own and reads those of all: ``path`` is the first process's,
    ``<stem>.1<suffix>`` the second's, and so on, whether or not that process is still there. A line is on disk before
    `append` returns. A last line that an interruption left unfinished is cut off on opening. Values stay on disk and
    are read when they are asked for.

    Parameters
    ----------
    path : Path
    header : dict
        Must equal the header of every existing file.
    process : int
        Number of this process, from 0.

    Raises
    ------
    TraceError
        If a file was made with other settings, or is damaged, or this process's is in use.
    """

    def __init__(self, path: Path, header: dict[str, Any], process: int = 0) -> None:
        self._first, self.header = path, header
        self.path = _numbered(path, process)
        self._own = _File(self.path, process)
        self._files = {process: self._own}
        self._places: dict[str, tuple[int, int]] = {}  # of each document: number of its file, offset of its line
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = self.path.open("ab")
        try:
            self._lock()
            self._cut()
            if not self.path.stat().st_size:
                self._write(header)
            self.look()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> DocumentStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __getitem__(self, document: str) -> list[Any]:
        number, offset = self._places[document]
        with self._files[number].path.open("rb") as file:
            file.seek(offset)
            value: list[Any] = strictjson.parse(file.readline())["value"]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, document: object) -> bool:
        return document in self._places

    def append(self, document: str, value: list[Any]) -> None:
        """Keep the result of a document that is not there yet."""
        assert document not in self._places
        self._places[document] = (self._own.number, self._own.read)
        self._own.read += self._write({"id": document, "value": value})

    def look(self) -> None:
        """Read what all processes have written since this one looked last."""
        for path in self._first.parent.glob(f"{_literal(self._first.stem)}*{_literal(self._first.suffix)}"):
            number = _number(self._first, path)
            if number is not None and number not in self._files:
                self._files[number] = _File(path, number)
        for file in self._files.values():
            self._read(file)

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

    def _cut(self) -> None:
        data = self.path.read_bytes()
        self._file.truncate(data.rfind(b"\n") + 1)

    def _write(self, row: dict[str, Any]) -> int:
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        return len(line)

    def _read(self, file: _File) -> None:
        """Note where the documents of a file stand; where several files hold one, the lowest number counts."""
        with file.path.open("rb") as lines:
            lines.seek(file.read)
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # its process is writing it, or was killed while it did
                self._note(file, line)
                file.read += len(line)

    def _note(self, file: _File, line: bytes) -> None:
        try:
            row = strictjson.parse(line)
            if not isinstance(row, dict) or (file.read and not isinstance(row["value"], list)):
                raise ValueError("a line has another form")
            document = row["id"] if file.read else None
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"`{file.path}` is damaged ({error}); delete it to start anew") from error
        if document is None:
            self._check_header(file, row)
        elif document not in self._places or self._places[document][0] > file.number:
            self._places[document] = (file.number, file.read)

    def _check_header(self, file: _File, found: dict[str, Any]) -> None:
        if found != self.header:
            differing = sorted(key for key in self.header if found.get(key) != self.header[key])
            raise TraceError(
                f"`{file.path}` was left by a run with another {', '.join(differing)}; delete it to start anew, "
                "or go on with the settings it was made with"
            )


def _numbered(path: Path, process: int) -> Path:
    return path.with_name(f"{path.stem}.{process}{path.suffix}") if process else path


def _number(first: Path, path: Path) -> int | None:
    """Return which process's file `path` is, None if it is none."""
    if path == first:
        return 0
    found = re.fullmatch(re.escape(first.stem) + r"\.([1-9][0-9]*)" + re.escape(first.suffix), path.name)
    return int(found[1]) if found else None


def _literal(text: str) -> str:
    """Write a file name so that glob takes it as it is."""
    return re.sub(r"([*?[])", r"[\1]", text)
