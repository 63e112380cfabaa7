"""Checkpoints of Medusa heads: read strictly, heads and layers counted from the tensors, and written."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from treeopt.errors import HeadsError
from treeopt.files import replacing
from treeopt.heads.files import HEADS_FILES, TensorFiles
from treeopt.heads.formats import BLOCKS_FIRST, HEADS_FIRST, Names, recognise
from treeopt.heads.vocabulary import mapped_ids

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Heads as a checkpoint holds them.

    Attributes
    ----------
    source : Path
        The file or index.
    names : Names
        Format, prefix, heads and layers, and the file's name of each tensor.
    hidden_size : int
    tensors : dict of str to Tensor
        Under the module's names. Blocks without a bias have one of zeros here, which computes the same.
    ids : Tensor of int64 or None
        The target's token of each row of the output embeddings, where there is a map.
    disagreements : tuple of str
        What config.json says otherwise, a line each.
    """

    source: Path
    names: Names
    hidden_size: int
    tensors: dict[str, Tensor]
    ids: Tensor | None
    disagreements: tuple[str, ...]

    @property
    def num_heads(self) -> int:
        """Counted from the tensors."""
        return self.names.num_heads

    @property
    def num_layers(self) -> int:
        """Counted from the tensors."""
        return self.names.num_layers

    @property
    def own_lm_heads(self) -> bool:
        """Whether the heads bring output embeddings."""
        return self.names.own_lm_heads

    @property
    def vocabulary(self) -> int | None:
        """Rows of the heads' own output embeddings, or None without any."""
        return _rows(self.tensors)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the stored tensors, by name."""
        stored = (self.tensors[name] for name in self.names.tensors)
        return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored}))

    def report(self) -> None:
        """Print the disagreements on stderr: published configurations are wrong, and the weights are right."""
        for line in self.disagreements:
            print(line, file=sys.stderr)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint file, the one in a directory, or the one of a hub id.

    Of a whole model only the heads' tensors are read.

    Raises
    ------
    HeadsError
        If there is none, it cannot be read, or a tensor is missing, unknown, mis-shaped or not finite.
    """
    files = TensorFiles.find(path)
    config_path, config = files.config()
    names = recognise(files.source, files.shards, shared=bool((config or {}).get("original_lm_head")))
    stored = files.read(sorted({*names.tensors.values(), *names.maps.values()}))
    ids = mapped_ids(files.source, {kind: stored[name] for kind, name in names.maps.items()})
    tensors = {name: stored[original] for name, original in names.tensors.items()}
    hidden_size = _check_shapes(files.source, names, tensors)
    for original in set(names.tensors.values()):
        _check_values(files.source, original, stored[original])
    tensors = _selected(files.source, names, tensors, ids)
    counted = _counted(names, hidden_size, _rows(tensors), mapped=ids is not None)
    disagreements = _disagreements(config_path, config, counted)
    return Checkpoint(files.source, names, hidden_size, _with_biases(names, tensors), ids, disagreements)


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    num_heads: int,
    num_layers: int,
    *,
    vllm: bool = False,
    ids: Tensor | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write tensors and a config.json: format A or C, by whether there are output embeddings, or D.

    Parameters
    ----------
    directory : Path
    tensors : mapping of str to Tensor
        Under the module's names, biases included.
    num_heads, num_layers : int
    vllm : bool
        Format D.
    ids : Tensor of int64, optional
        Written as ``token_map``; for format D only.
    vocab_size : int, optional
        Of the target; for format D only.
    """
    own = "lm_heads.0.weight" in tensors
    layout = BLOCKS_FIRST if vllm else HEADS_FIRST
    names = layout.names(num_heads, num_layers, lm_heads=own)
    if vllm:
        rows, hidden_size = tensors["lm_heads.0.weight"].shape
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "hidden_size": hidden_size,
            "medusa_fc_bias": True,
            "model_type": "medusa",
            "num_heads": num_heads,
            "num_hidden_layers": num_layers,
            "original_lm_head": False,
            "truncated_vocab_size": rows,
            "vocab_size": vocab_size or rows,
        }
    else:
        config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, **({} if own else {"version": "2"})}
    stored = {names[name]: value for name, value in _apart(tensors).items()}
    if ids is not None:
        stored["token_map"] = ids
    with replacing(directory / ("model.safetensors" if vllm else HEADS_FILES[0])) as temporary:
        save_file(stored, temporary, metadata={"format": "pt"} if vllm else None)
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with memory of their own, which the file format demands; heads may share one embedding."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return found


def _check_shapes(source: Path, names: Names, tensors: Mapping[str, Tensor]) -> int:
    """Return the hidden size that most tensors have; refuse the others."""
    widths = Counter(tensor.shape[-1] for tensor in tensors.values() if tensor.ndim)
    heights = Counter(tensor.shape[0] for name, tensor in tensors.items() if _is_lm_head(name) and tensor.ndim)
    hidden_size = widths.most_common(1)[0][0] if widths else 0
    for name, tensor in tensors.items():
        expected: tuple[int, ...] = (hidden_size,) if name.endswith("bias") else (hidden_size, hidden_size)
        if _is_lm_head(name):
            expected = (heights.most_common(1)[0][0] if heights else 0, hidden_size)
        if tuple(tensor.shape) != expected:
            raise HeadsError(
                f"`{source}`: `{names.tensors[name]}` has shape {tuple(tensor.shape)}, the other tensors need {expected}; "
                "get the checkpoint again"
            )
    return hidden_size


def _check_values(source: Path, name: str, tensor: Tensor) -> None:
    # A NaN beats and ties with nothing, so that every rank would be counted as 0.
    if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
        raise HeadsError(f"`{source}`: `{name}` holds NaN, infinities or no floating point; train it again")


def _selected(source: Path, names: Names, tensors: dict[str, Tensor], ids: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors with the mapped rows of the output embeddings: some files hold all rows beside a map."""
    rows = _rows(tensors)
    if ids is None or rows == len(ids):
        return tensors
    kind = next(name for name in ("token_map", "d2t") if name in names.maps)
    if rows is None:
        raise HeadsError(f"`{source}` has a `{kind}` but no output embeddings for it to map; get the whole checkpoint")
    if kind != "token_map" or rows < len(ids) or int(ids.max()) >= rows:
        raise HeadsError(
            f"`{source}`: `{names.tensors['lm_heads.0.weight']}` has {rows} rows, `{kind}` {len(ids)}; they must be equal"
        )
    return {name: tensor[ids] if _is_lm_head(name) else tensor for name, tensor in tensors.items()}


def _with_biases(names: Names, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if names.bias:
        return tensors
    zeros = {
        name.removesuffix("weight") + "bias": tensor.new_zeros(len(tensor))
        for name, tensor in tensors.items()
        if not _is_lm_head(name)
    }
    return tensors | zeros


def _rows(tensors: Mapping[str, Tensor]) -> int | None:
    return len(tensors["lm_heads.0.weight"]) if "lm_heads.0.weight" in tensors else None


def _is_lm_head(name: str) -> bool:
    return name.startswith("lm_heads.")


def _counted(names: Names, hidden_size: int, rows: int | None, *, mapped: bool) -> dict[str, Any]:
    """Return what config.json should say, by its own keys."""
    counted: dict[str, Any] = {"hidden_size": hidden_size}
    if names.format != "D":
        return counted | {"medusa_num_heads": names.num_heads, "medusa_num_layers": names.num_layers}
    counted |= {"num_heads": names.num_heads, "num_hidden_layers": names.num_layers, "medusa_fc_bias": names.bias}
    counted["original_lm_head"] = len({name for key, name in names.tensors.items() if _is_lm_head(key)}) <= 1
    if names.num_heads == 1 and rows is not None:
        del counted["original_lm_head"]  # one head looks the same either way
    if rows is not None:
        counted |= {"truncated_vocab_size": rows} | ({} if mapped else {"vocab_size": rows})
    return counted


def _disagreements(path: Path, config: dict[str, Any] | None, counted: Mapping[str, Any]) -> tuple[str, ...]:
    if config is None:
        return (f"`{path}` is not JSON and is not read: heads and layers are counted from the weights",)
    return tuple(
        f"`{path}` says {key} = {config[key]}, the weights hold {value}: using {value}"
        for key, value in counted.items()
        if config.get(key, value) != value
    )
