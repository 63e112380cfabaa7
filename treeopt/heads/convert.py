"""Conversions between checkpoint formats, made where they lose nothing and refused where they would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from treeopt.errors import HeadsError
from treeopt.heads.checkpoint import Checkpoint, write_checkpoint
from treeopt.heads.files import MODEL_FILES, TensorFiles

__all__ = ["WRITTEN_FORMATS", "convert", "read_lm_head"]

WRITTEN_FORMATS = ("A", "C", "D")


def convert(found: Checkpoint, to: str, directory: Path, lm_head: Tensor | None = None) -> None:
    """Write a checkpoint in another format.

    Parameters
    ----------
    found : Checkpoint
        Of any format.
    to : {'A', 'C', 'D'}
        A: every head with its output embedding; C: blocks alone; D: as vLLM names them.
    directory : Path
        New or empty.
    lm_head : Tensor, shape (vocabulary, hidden), optional
        The target's output embedding: what heads without one of their own read. Needed from C to A or D, where it is
        copied, and from A, B or D to C, where it must equal every head's.

    Raises
    ------
    HeadsError
        If the format cannot hold the heads exactly, naming the reason, or the directory holds anything.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise HeadsError(f"`{directory}` is not empty; give a new directory")
    if found.ids is not None and to != "D":
        raise HeadsError(f"`{found.source}` has a vocabulary map, which format {to} has no place for; convert it to D")
    if lm_head is not None and (lm_head.ndim != 2 or not lm_head.is_floating_point()):
        raise HeadsError(
            f"the target's output embedding has shape {tuple(lm_head.shape)} and dtype {lm_head.dtype}; give a target whose "
            "output embedding is not quantised"
        )
    if lm_head is not None and lm_head.shape[-1] != found.hidden_size:
        raise HeadsError(
            f"`{found.source}`: hidden size {found.hidden_size}, the target's is {lm_head.shape[-1]}; these heads belong to "
            "another target"
        )
    tensors = _shared(found, lm_head) if to == "C" else _owned(found, to, lm_head)
    vocab_size = None if lm_head is None else len(lm_head)
    if found.ids is not None and vocab_size is None:
        raise HeadsError(
            f"`{found.source}` has a vocabulary map, and format D states the target's vocabulary beside one; give --target"
        )
    write_checkpoint(
        directory, tensors, found.num_heads, found.num_layers, vllm=to == "D", ids=found.ids, vocab_size=vocab_size
    )


def read_lm_head(where: str | Path, names: Sequence[str]) -> Tensor | None:
    """Read a target's output embedding from its files, and nothing else of it.

    Parameters
    ----------
    where : str or Path
        A local directory or a hub id.
    names : sequence of str
        The names it may have.

    Returns
    -------
    Tensor or None
        None if the files hold none of these names.
    """
    files = TensorFiles.find(where, MODEL_FILES)
    held = [name for name in names if name in files.shards][:1]
    return files.read(held)[held[0]] if held else None


def _owned(found: Checkpoint, to: str, lm_head: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors with an output embedding for every head."""
    if found.own_lm_heads:
        return found.tensors
    if lm_head is None:
        raise HeadsError(
            f"`{found.source}` reads the target's output embedding, and format {to} holds a copy of it; give --target"
        )
    return found.tensors | {f"lm_heads.{head}.weight": lm_head for head in range(found.num_heads)}


def _shared(found: Checkpoint, lm_head: Tensor | None) -> dict[str, Tensor]:
    """Return the blocks alone, if every head's output embedding is the target's."""
    if not found.own_lm_heads:
        return found.tensors
    if lm_head is None:
        raise HeadsError(
            f"`{found.source}` has output embeddings of its own, and format C leaves them out where they equal the target's; "
            "give --target"
        )
    for head in range(found.num_heads):
        name, own = found.names.tensors[f"lm_heads.{head}.weight"], found.tensors[f"lm_heads.{head}.weight"]
        if own.shape != lm_head.shape:
            raise HeadsError(
                f"`{found.source}`: `{name}` has shape {tuple(own.shape)}, the target's output embedding "
                f"{tuple(lm_head.shape)}; format C would lose it"
            )
        common = torch.promote_types(own.dtype, lm_head.dtype)
        different = int((own.to(common) != lm_head.to(common)).sum())
        if different:
            raise HeadsError(
                f"`{found.source}`: `{name}` differs from the target's output embedding in {different} of {own.numel()} "
                "values; format C would lose it"
            )
    return {name: tensor for name, tensor in found.tensors.items() if not name.startswith("lm_heads.")}
