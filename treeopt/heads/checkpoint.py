"""Checkpoint files of Medusa heads: read strictly, heads and layers counted from the tensors.

Two forms are read: residual blocks alone, to be used with the target's output embedding, and blocks followed by an
output embedding for each head. Tensor ``{head}.{layer}.linear.weight`` is a block's, ``{head}.{layers}.weight`` the
embedding's.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from treeopt.errors import HeadsError
from treeopt.files import replacing

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

FILE_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors of a checkpoint under the module's names.

    Attributes
    ----------
    num_heads, num_layers : int
        Counted from the tensors.
    own_lm_heads : bool
        Whether each head brings its output embedding.
    tensors : dict of str to Tensor
    names : dict of str to str
        The file's name of each tensor.
    """

    num_heads: int
    num_layers: int
    own_lm_heads: bool
    tensors: dict[str, Tensor]
    names: dict[str, str]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint file, the one in a directory, or the one of a hub id.

    Raises
    ------
    HeadsError
        If there is none, it cannot be read, or a tensor is missing or unknown.
    """
    file = _find(Path(path))
    found = _load(file)
    blocks = {name: match for name in found if (match := BLOCK.fullmatch(name))}
    lm_heads = {name: match for name in found if (match := LM_HEAD.fullmatch(name))}
    unknown = sorted(set(found) - set(blocks) - set(lm_heads))
    if unknown:
        raise HeadsError(f"`{file}` has the tensor `{unknown[0]}`, which no Medusa head has; give heads alone")
    if not blocks:
        raise HeadsError(f"`{file}` holds no residual block (`0.0.linear.weight`); it is no checkpoint of Medusa heads")
    num_heads = 1 + max(int(match[1]) for match in (*blocks.values(), *lm_heads.values()))
    num_layers = 1 + max(int(match[2]) for match in blocks.values())
    if num_heads * num_layers > len(found):
        raise HeadsError(
            f"`{file}` names head {num_heads - 1} but holds {len(found)} tensors; get the whole checkpoint again"
        )
    names = _expected(num_heads, num_layers, own_lm_heads=bool(lm_heads))
    missing = sorted(set(names.values()) - set(found))
    if missing:
        raise HeadsError(f"`{file}` lacks the tensor `{missing[0]}`; get the whole checkpoint again")
    extra = sorted(set(found) - set(names.values()))
    if extra:
        raise HeadsError(f"`{file}` has `{extra[0]}` beside {num_layers} layers a head; it is not of one form")
    _compare_with_config(file, num_heads, num_layers)
    tensors = {name: found[original] for name, original in names.items()}
    for name, tensor in tensors.items():
        # A NaN beats and ties with nothing, so that every rank would be counted as 0.
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise HeadsError(f"`{file}`: `{names[name]}` holds NaN, infinities or no floating point; train it again")
    return Checkpoint(num_heads, num_layers, bool(lm_heads), tensors, names)


def write_checkpoint(directory: Path, tensors: dict[str, Tensor], num_heads: int, num_layers: int) -> None:
    """Write tensors under the file's names, and a config.json beside them."""
    names = _expected(num_heads, num_layers, own_lm_heads=any(name.startswith("lm_heads.") for name in tensors))
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "version": "2"}
    with replacing(directory / FILE_NAMES[0]) as temporary:
        save_file({names[name]: value.contiguous() for name, value in tensors.items()}, temporary)
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def _expected(num_heads: int, num_layers: int, *, own_lm_heads: bool) -> dict[str, str]:
    """Map the module's names to the file's."""
    names = {
        f"blocks.{head}.{layer}.linear.{kind}": f"{head}.{layer}.linear.{kind}"
        for head in range(num_heads)
        for layer in range(num_layers)
        for kind in ("weight", "bias")
    }
    if own_lm_heads:
        names |= {f"lm_heads.{head}.weight": f"{head}.{num_layers}.weight" for head in range(num_heads)}
    return names


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name in FILE_NAMES:
        if (path / name).is_file():
            return path / name
    if not path.exists() and HUB_ID.fullmatch(path.as_posix()):
        return _from_hub(path.as_posix())
    raise HeadsError(
        f"`{path}` holds no {' or '.join(FILE_NAMES)}; give a directory or file of Medusa heads, or a hub id"
    )


def _from_hub(repository: str) -> Path:
    """Fetch the heads, and their config.json if there is one, into the hub's own cache."""
    try:
        for name in FILE_NAMES:
            if (found := _download(repository, name)) is not None:
                _download(repository, "config.json")
                return found
    except Exception as error:  # offline, no such repository, no permission: the hub has many
        reason = _first_line(error)
        raise HeadsError(f"`{repository}` is no directory here and not to be had from the hub ({reason})") from error
    raise HeadsError(f"`{repository}` on the hub holds no {' or '.join(FILE_NAMES)}; give a repository of Medusa heads")


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


def _load(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        # weights_only: a checkpoint is data, and unpickling anything else would run it.
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise HeadsError(f"`{file}` cannot be read ({_first_line(error)}); get the checkpoint again") from error
    except Exception as error:  # pickle's own errors have no common base
        raise HeadsError(f"`{file}` holds more than tensors and is not loaded ({_first_line(error)})") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise HeadsError(f"`{file}` holds no mapping of names to tensors; give a state dict of Medusa heads")
    return loaded


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _compare_with_config(file: Path, num_heads: int, num_layers: int) -> None:
    """Say so in one line when config.json disagrees: published ones do, and the weights are right."""
    config = file.parent / "config.json"
    if not config.is_file():
        return
    try:
        stated = json.loads(config.read_text(encoding="utf8"))
    except ValueError:
        print(f"`{config}` is not JSON and is not read: heads and layers are counted from the weights", file=sys.stderr)
        return
    if not isinstance(stated, dict):
        stated = {}
    counted = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    for key, value in counted.items():
        if stated.get(key, value) != value:
            print(f"`{config}` says {key} = {stated[key]}, the weights hold {value}: using {value}", file=sys.stderr)
