"""Acceptance: which path of the tree the target agrees with, and which token follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from treeopt.attention.passes import words_of
from treeopt.buffers import TreeBuffers, ancestor_rows
from treeopt.products import argmax
from treeopt.tree import DraftTree

__all__ = ["Acceptance", "AcceptedPaths", "Greedy", "NodeScores", "TreeIndex", "accept_greedily", "walk"]


@dataclass(frozen=True, slots=True)
class TreeIndex:
    """A tree's index arrays on a device.

    Attributes
    ----------
    mask : Tensor of bool, shape (nodes, nodes)
    words : Tensor of int64, shape (nodes, words)
        The mask packed.
    parents : Tensor of int64, shape (nodes,)
        The root is its own parent here, so that it can index.
    depths : Tensor of int64, shape (nodes,)
    ranks : Tensor of int64, shape (nodes,)
    paths : Tensor of int64, shape (nodes, max_depth + 1)
        Nodes from the root to each node; the node itself again behind its end.
    children : Tensor of int64, shape (nodes, most children)
        By rank; -1 behind the last.
    inner : tuple of (int, Tensor of int64)
        Nodes that have children, with these; parents first.
    """

    mask: Tensor
    words: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    paths: Tensor
    children: Tensor
    inner: tuple[tuple[int, Tensor], ...]

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> TreeIndex:
        """Move a tree's index arrays to a device."""
        paths = torch.from_numpy(ancestor_rows(tree))
        own = torch.arange(tree.num_nodes)[:, None]
        mask = torch.from_numpy(TreeBuffers.of(tree).attention_mask)
        children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
        for node in range(1, tree.num_nodes):
            children[int(tree.parents[node])].append(node)
        most = max(map(len, children))
        return cls(
            mask=mask.to(device),
            words=words_of(mask).to(device),
            parents=torch.from_numpy(tree.parents.clip(min=0)).to(device),
            depths=torch.from_numpy(tree.depths.copy()).to(device),
            ranks=torch.from_numpy(tree.ranks.copy()).to(device),
            paths=torch.where(paths < 0, own, paths).to(device),
            children=torch.tensor([row + [-1] * (most - len(row)) for row in children], dtype=torch.int64).to(device),
            inner=tuple((node, torch.tensor(row).to(device)) for node, row in enumerate(children) if row),
        )

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return self.paths.shape[1] - 1


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


Processors = Callable[[Any, Any], Any]
"""Takes ids (1, length) and scores (1, vocabulary), as a logits processor of transformers does."""


@dataclass(frozen=True, eq=False, slots=True)
class NodeScores:
    """What the target says after each node, made ready only for the nodes that a rule looks at.

    A whole tree's probabilities would be nodes × vocabulary floats beside the logits; a walk reads depth + 1 rows.

    Attributes
    ----------
    logits : Tensor, shape (batch, nodes, vocabulary)
        Products with the output embedding, as they are.
    tokens : Tensor of int64, shape (batch, nodes)
    index : TreeIndex
    scaled : callable
        Applies the target's own scales and soft-caps.
    exact : callable
        The same, where it could change an argmax.
    processors : callable or None
        Logits processors; they are given the text that leads to a node.
    texts : sequence of Tensor of int64, each (length,)
        The text before the root of each row, for the processors.
    """

    logits: Tensor
    tokens: Tensor
    index: TreeIndex
    scaled: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    processors: Processors | None = None
    texts: Sequence[Tensor] = ()

    @property
    def plain(self) -> bool:
        """Whether the argmax of the logits is that of the scores."""
        return self.processors is None

    def at(self, nodes: Tensor) -> Tensor:
        """Return the scores after one node of each row, (batch, vocabulary) in float32 or wider.

        Parameters
        ----------
        nodes : Tensor of int64, shape (batch,)
        """
        rows = torch.arange(len(nodes), device=nodes.device)
        scores = self.scaled(self.logits[rows, nodes])
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if self.processors is None:
            return scores
        processed = []
        for row, (node, depth) in enumerate(torch.stack([nodes, self.index.depths[nodes]], dim=1).tolist()):
            path = self.tokens[row, self.index.paths[node, : depth + 1]]
            processed.append(self.processors(torch.cat([self.texts[row], path])[None], scores[row : row + 1]))
        return torch.cat(processed)


class Acceptance(Protocol):
    """A rule of acceptance.

    Attributes
    ----------
    name : str
    random : bool
        Whether it draws random numbers.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def random(self) -> bool: ...  # noqa: D102

    def accept(self, scores: NodeScores) -> AcceptedPaths:
        """Return the accepted paths; nothing is read back to the host."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """The longest path whose every token is the target's likeliest."""

    name: str = "greedy"
    random: bool = False

    def accept(self, scores: NodeScores) -> AcceptedPaths:
        """Return the accepted paths."""
        if scores.plain:
            return accept_greedily(scores.tokens, argmax(scores.exact(scores.logits)), scores.index)
        return walk(scores, argmax)


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
    nodes = deepest(standing(matches, index), index)
    return AcceptedPaths(nodes=nodes, lengths=index.depths[nodes], bonus=chosen.gather(1, nodes[:, None])[:, 0])


def standing(passes: Tensor, index: TreeIndex) -> Tensor:
    """Return which nodes pass with all their ancestors, (batch, nodes); the root is decided already."""
    failed = ~passes
    failed[:, 0] = False
    return ~(index.mask & failed[:, None, :]).any(dim=-1)


def deepest(stands: Tensor, index: TreeIndex) -> Tensor:
    """Return the deepest standing node of each row, the first of several."""
    return torch.where(stands, index.depths, -1).argmax(dim=-1)


def walk(scores: NodeScores, choose: Callable[[Tensor], Tensor]) -> AcceptedPaths:
    """Let the target choose its next token at each node, and follow the child that carries it as long as there is one.

    Parameters
    ----------
    scores : NodeScores
    choose : callable
        Takes scores (batch, vocabulary) and returns one token a row.
    """
    tokens, index = scores.tokens, scores.index
    node = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    length, bonus = torch.zeros_like(node), torch.zeros_like(node)
    going = torch.ones_like(node, dtype=torch.bool)
    for _ in range(index.max_depth + 1):
        token = choose(scores.at(node))
        child = _child(tokens, index, node, token)
        found = going & (child >= 0)
        bonus = torch.where(going & ~found, token, bonus)
        node = torch.where(found, child, node)
        length = length + found
        going = found
        # Reading a flag costs nothing on a CPU; elsewhere it waits for the device, as processors have done anyway.
        if (tokens.device.type == "cpu" or not scores.plain) and not bool(going.any()):
            break
    return AcceptedPaths(node, length, bonus)


def _child(tokens: Tensor, index: TreeIndex, node: Tensor, token: Tensor) -> Tensor:
    """Return the first child of each row's node that carries its token, -1 where none does."""
    children = index.children[node]  # [batch, most children]
    if not children.shape[1]:
        return torch.full_like(node, -1)
    carries = (children >= 0) & (tokens.gather(1, children.clamp(min=0)) == token[:, None])
    first = children.gather(1, carries.to(torch.int8).argmax(dim=1, keepdim=True))[:, 0]
    return torch.where(carries.any(dim=1), first, -1)
