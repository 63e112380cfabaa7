"""Where the nodes of a tree stand: a level a row, children below their parent, no two edges crossing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from treeopt.plot.spacing import spaced
from treeopt.tree import DraftTree

__all__ = ["Layout", "drawn_part", "lay_out"]

SWEEPS = 12
SCALES = (1.0, 0.8, 0.65, 0.5)  # of the likeliest nodes
DOTS = (1.6, 1.2, 0.9)  # diameters of nodes without room for their rank, in points
FAMILY_GAP, LOOSEST = 0.6, 1.8  # in diameters; of the room that nodes need
MAX_DRAWN = 512  # nodes; of more, dots in a row would touch

Places = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Layout:
    """Places and sizes of nodes, in points.

    Attributes
    ----------
    x, y : ndarray of float64, shape (num_nodes,)
        Centres; the root's y is 0 and the deepest level's is the height.
    diameters : ndarray of float64, shape (num_nodes,)
    labelled : ndarray of bool, shape (num_nodes,)
        Nodes whose rank fits into them.
    """

    x: Places
    y: Places
    diameters: Places
    labelled: NDArray[np.bool_]


def drawn_part(tree: DraftTree, probabilities: Places) -> tuple[DraftTree, Places]:
    """Return what to draw of a tree and its path probabilities: all of it, or the likeliest nodes of a huge one."""
    if tree.num_nodes <= MAX_DRAWN:
        return tree, probabilities
    # A path is never likelier than its parent, and of equal ones the parent comes first: the likeliest are a tree.
    likeliest = np.sort(np.argsort(-probabilities, kind="stable")[:MAX_DRAWN])
    return DraftTree.from_paths([tree.paths[node] for node in likeliest[1:]]), probabilities[likeliest]


def lay_out(
    tree: DraftTree, probabilities: Places, *, width: float, height: float, largest: float, font_size: float
) -> Layout:
    """Place nodes whose area tells their path probability, as far as ranks of a size to read leave room for it.

    Parameters
    ----------
    tree : DraftTree
    probabilities : ndarray of float64, shape (num_nodes,)
    width, height : float
        Of the drawing, in points.
    largest : float
        Diameter of the likeliest node, in points.
    font_size : float
        Of the ranks, in points.
    """
    room = _room(tree, font_size)
    diameters = _diameters(tree, probabilities, width, largest, room)
    x = _columns(tree, _extents(tree, diameters, width), width)
    y = np.asarray(tree.depths * (height / max(1, tree.max_depth)), dtype=np.float64)
    labelled = diameters >= room - 1e-9
    labelled[0] = False
    return Layout(x, y, diameters, labelled)


def _room(tree: DraftTree, font_size: float) -> Places:
    """Return the smallest circle around each node's rank: a digit is 0.64 of its size wide and 0.73 high."""
    digits = np.char.str_len(tree.ranks.astype(str))
    room: Places = np.hypot(0.64 * font_size * digits, 0.73 * font_size)
    return room


def _diameters(tree: DraftTree, probabilities: Places, width: float, largest: float, room: Places) -> Places:
    """Return diameters by the root of the probability, the likeliest nodes enlarged for their rank while levels fit."""
    likeliest = max(float(probabilities[1:].max(initial=0.0)), 1e-12)
    place = np.empty(tree.num_nodes, dtype=np.int64)
    place[np.argsort(-probabilities, kind="stable")] = np.arange(tree.num_nodes)

    def sized(scale: float, dot: float, enlarged: int, fitting: float = 0.9) -> Places:
        natural = scale * largest * np.sqrt(np.minimum(probabilities / likeliest, 1.0))
        natural[0] = room[0]
        common = float(np.quantile(room[place < enlarged], fitting)) if enlarged else 0.0
        return np.maximum(natural, np.where(place < enlarged, common, dot))

    def fits(diameters: Places) -> bool:
        return bool((np.bincount(tree.depths, weights=diameters + _gap(diameters)) <= width).all())

    for fitting, scale in itertools.product((1.0, 0.9), SCALES):
        if fits(everywhere := sized(scale, 0.0, tree.num_nodes, fitting)):
            return everywhere
    scale, dot = next(
        ((scale, dot) for dot, scale in itertools.product(DOTS, SCALES) if fits(sized(scale, dot, 0))), (0.0, DOTS[-1])
    )
    low, high = 0, tree.num_nodes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(sized(scale, dot, middle)) else (low, middle - 1)
    return sized(scale, dot, low)


def _gap(diameters: Places) -> Places:
    gap: Places = np.minimum(1.5, 0.25 * diameters)
    return gap


def _extents(tree: DraftTree, diameters: Places, width: float) -> Places:
    """Return the room of each node in its row: as wide as the fullest level allows, and wider between families."""
    tight = diameters + _gap(diameters)
    ends = np.ones(tree.num_nodes)
    ends[1:-1] = (tree.parents[1:-1] != tree.parents[:-2]).astype(float) + (tree.parents[1:-1] != tree.parents[2:])
    families = tight + FAMILY_GAP * diameters * ends / 2
    fullest = np.bincount(tree.depths, weights=families).max()
    if fullest <= width:
        return np.asarray(families * min(LOOSEST, width / fullest), dtype=np.float64)
    least = np.bincount(tree.depths, weights=tight).max()
    share = (width - least) / max(fullest - least, 1e-9)
    return np.asarray(tight + max(0.0, share) * (families - tight), dtype=np.float64)


def _columns(tree: DraftTree, extents: Places, width: float) -> Places:
    """Return x of each node: levels spread evenly, then drawn toward parents and children in turn."""
    graph = nx.Graph()
    graph.add_nodes_from((node, {"depth": depth}) for node, depth in enumerate(tree.depths.tolist()))
    even = nx.multipartite_layout(graph, subset_key="depth", align="horizontal")
    x = np.array([even[node][0] for node in range(tree.num_nodes)])
    levels = [np.flatnonzero(tree.depths == depth) for depth in range(tree.max_depth + 1)]
    reach = max(float(np.abs(x).max()), 1e-12)
    x = width / 2 * (1 + x / reach)
    children = np.bincount(tree.parents[1:], minlength=tree.num_nodes)
    for _ in range(SWEEPS):
        for level in levels[1:]:
            x[level] = spaced(x[tree.parents[level]], extents[level], 0.0, width)
        for level in reversed(levels[:-1]):
            below = np.bincount(tree.parents[1:], weights=x[1:], minlength=tree.num_nodes)[level]
            wanted = np.where(children[level] > 0, below / np.maximum(children[level], 1), x[level])
            x[level] = spaced(wanted, extents[level], 0.0, width)
    left, right = float((x - extents / 2).min()), float((x + extents / 2).max())
    return np.asarray(x + (width - left - right) / 2, dtype=np.float64)
