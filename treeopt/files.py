"""Files: where caches live, and writing so that a reader never meets half a file."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_directory", "publish", "replacing"]


def cache_directory() -> Path:
    """Return the directory for files that can be made again: TREEOPT_CACHE, else the platform's cache directory."""
    if given := os.environ.get("TREEOPT_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "treeopt"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` on success, remove it on any failure.

    An interrupted run leaves the old file whole, because a rename within a directory is atomic.
    """
    path = Path(os.path.realpath(path))  # through a symbolic link, so that the link stays one
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory; give the name of a file", str(path))
    if path.exists() and not path.is_file():
        yield path  # a device or pipe is written to, never replaced
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes files that only the owner can read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish(directory: Path, final: Path) -> None:
    """Move a finished directory to its final name; if another process was first, keep the other's."""
    try:
        directory.replace(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(directory)
