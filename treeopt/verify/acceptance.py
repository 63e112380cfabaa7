"""Greedy acceptance by parent pointers: a node stands when every token on its path is the target's own choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.buffers import TreeBuffers, ancestor_rows
from treeopt.tree import DraftTree

__all__ = ["AcceptedPaths", "TreeIndex", "accept_greedily"]


@dataclass(frozen=True, slots=True)
class TreeIndex:
    """A tree's index arrays on a device.

    Attributes
    ----------
    mask : Tensor of bool, shape (nodes, nodes)
    parents : Tensor of int64, shape (nodes,)
        The root is its own parent here, so that it can index.
    depths : Tensor of int64, shape (nodes,)
    ranks : Tensor of int64, shape (nodes,)
    paths : Tensor of int64, shape (nodes, max_depth + 1)
        Nodes from the root to each node; the node itself again behind its end.
    """

    mask: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    paths: Tensor

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> TreeIndex:
        """Move a tree's index arrays to a device."""
        rows = ancestor_rows(tree)
        own = torch.arange(tree.num_nodes)[:, None]
        paths = torch.from_numpy(rows)
        return cls(
            mask=torch.from_numpy(TreeBuffers.of(tree).attention_mask).to(device),
            parents=torch.from_numpy(tree.parents.clip(min=0)).to(device),
            depths=torch.from_numpy(tree.depths.copy()).to(device),
            ranks=torch.from_numpy(tree.ranks.copy()).to(device),
            paths=torch.where(paths < 0, own, paths).to(device),
        )


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """The accepted path of each row of a batch.

    Attributes
    ----------
    nodes : Tensor of int64, shape (batch,)
        Last accepted node; 0 when no draft was accepted.
    lengths : Tensor of int64, shape (batch,)
        Accepted nodes, root excluded.
    bonus : Tensor of int64, shape (batch,)
        The target's own token after the last accepted node.
    """

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


def accept_greedily(tokens: Tensor, chosen: Tensor, index: TreeIndex) -> AcceptedPaths:
    """Accept the longest path whose every token equals the target's choice after its parent.

    Siblings carry distinct tokens, so at most one child of a node matches and the deepest standing node is unique.

    Parameters
    ----------
    tokens : Tensor of int64, shape (batch, nodes)
        Token of each node.
    chosen : Tensor of int64, shape (batch, nodes)
        The target's argmax after each node.
    index : TreeIndex
    """
    matches = tokens == chosen[:, index.parents]
    matches[:, 0] = True  # the root is decided already
    stands = ~(index.mask & ~matches[:, None, :]).any(dim=-1)  # [batch, nodes]
    nodes = torch.where(stands, index.depths, -1).argmax(dim=-1)
    return AcceptedPaths(nodes=nodes, lengths=index.depths[nodes], bonus=chosen.gather(1, nodes[:, None])[:, 0])
