"""Files of tensors: found in a directory or on the hub, listed without reading them, read tensor by tensor."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treeopt import strictjson
from treeopt.errors import HeadsError, first_line

__all__ = ["HEADS_FILES", "MODEL_FILES", "TensorFiles"]

HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_lm_head.safetensors.index.json")
MODEL_FILES = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
)  # fmt: skip
INDEX = ".index.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Tensors by name, in one file or in the shards of an index.

    Attributes
    ----------
    source : Path
        The file or the index; it stands in error texts.
    shards : dict of str to str
        Name of the file that holds each tensor, beside `source`.
    repository : str or None
        Hub id whose shards are fetched when they are read; None for a local directory.
    """

    source: Path
    shards: dict[str, str]
    repository: str | None = None

    @classmethod
    def find(cls, path: str | Path, names: Sequence[str] = HEADS_FILES + MODEL_FILES) -> TensorFiles:
        """Find a file, the first of `names` in a directory, or that of a hub id.

        Raises
        ------
        HeadsError
            If there is none or it cannot be read.
        """
        source, repository = _locate(Path(path), names)
        if source.name.endswith(INDEX):
            return cls(source, _weight_map(source), repository)
        return cls(source, dict.fromkeys(_names(source), source.name), repository)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read some of the tensors; files that hold none of them are not opened.

        Raises
        ------
        HeadsError
            If a file is missing or damaged, or lacks a tensor that the index places in it.
        """
        wanted: dict[str, list[str]] = {}
        for name in names:
            wanted.setdefault(self.shards[name], []).append(name)
        found: dict[str, Tensor] = {}
        for shard, held in wanted.items():
            found |= _read(self._file(shard), held)
        return found

    def config(self) -> tuple[Path, dict[str, Any] | None]:
        """Return the path of the config.json beside the tensors and what it holds.

        An empty dict where there is none, None where it is not JSON.
        """
        path = self.source.parent / "config.json"
        if not path.is_file():
            return path, {}
        try:
            stated = strictjson.parse(path.read_bytes())
        except ValueError:
            return path, None
        return path, stated if isinstance(stated, dict) else {}

    def _file(self, shard: str) -> Path:
        if shard == self.source.name:
            return self.source
        file = self.source.parent / shard
        if not file.is_file() and self.repository is not None:
            file = _fetch(self.repository, [shard]) or file
        if not file.is_file():
            raise HeadsError(f"`{self.source}` names `{shard}`, which is not there; get the whole checkpoint again")
        return file


def _locate(path: Path, names: Sequence[str]) -> tuple[Path, str | None]:
    if path.is_file():
        return path, None
    for name in (*names, *sorted(file.name for file in path.glob(f"*.safetensors{INDEX}"))):
        if (path / name).is_file():
            return path / name, None
    if not path.exists() and HUB_ID.fullmatch(path.as_posix()):
        repository = path.as_posix()
        if (found := _fetch(repository, names)) is not None:
            _fetch(repository, ["config.json"])
            return found, repository
        raise HeadsError(f"`{repository}` on the hub holds no {' or '.join(names)}; give a repository that does")
    raise HeadsError(f"`{path}` holds no {' or '.join(names)}; give a directory or file that does, or a hub id")


def _fetch(repository: str, names: Sequence[str]) -> Path | None:
    """Fetch the first of `names` that the repository has into the hub's own cache."""
    try:
        for name in names:
            if (found := _download(repository, name)) is not None:
                return found
    except Exception as error:  # offline, no such repository, no permission: the hub has many
        raise HeadsError(
            f"`{repository}` is no directory here and not to be had from the hub ({first_line(error)})"
        ) from error
    return None


def _download(repository: str, name: str) -> Path | None:
    """Return the fetched file, or None if the repository has none of that name."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name))
    except LocalEntryNotFoundError:
        raise  # also an EntryNotFoundError, but it says that the hub was not reached
    except EntryNotFoundError:
        return None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = strictjson.parse(index.read_bytes())
    except ValueError as error:
        raise HeadsError(f"`{index}` is {error}; get the checkpoint again") from error
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise HeadsError(f"`{index}` has no `weight_map` of tensors to files; get the checkpoint again")
    for name, shard in shards.items():
        # A name with a folder in it could point anywhere on the disk.
        if Path(shard).name != shard:
            raise HeadsError(f"`{index}` places `{name}` in `{shard}`, which is no file name; get the checkpoint again")
    return shards


def _names(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return list(_unpickled(file))
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _read(file: Path, names: Sequence[str]) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        held: dict[str, Tensor] = _unpickled(file)
        _require(file, names, held)
        return {name: held[name] for name in names}
    try:
        with safe_open(file, framework="pt") as opened:
            _require(file, names, opened.keys())
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _require(file: Path, names: Sequence[str], held: Iterable[str]) -> None:
    missing = sorted(set(names) - set(held))
    if missing:
        raise HeadsError(f"`{file}` lacks the tensor `{missing[0]}`, which the index places there; get it again")


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of torch's; those that nobody touches stay on the disk."""
    try:
        # weights_only: a checkpoint is data, and unpickling anything else would run it. Files from before torch 1.6 are
        # no archives and cannot be mapped.
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise _unreadable(file, error) from error
    except Exception as error:  # pickle's own errors have no common base
        raise HeadsError(f"`{file}` holds more than tensors and is not loaded ({first_line(error)})") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise HeadsError(f"`{file}` holds no mapping of names to tensors; give a state dict")
    return loaded


def _unreadable(file: Path, error: Exception) -> HeadsError:
    return HeadsError(f"`{file}` cannot be read ({first_line(error)}); get the checkpoint again")
