"""Limits that a tree can be asked to obey."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from treeopt.errors import ConstraintError
from treeopt.paths import Path, closed, format_path
from treeopt.tree import DraftTree

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What a tree may be. Every limit can be combined with every other.

    Attributes
    ----------
    num_nodes : int
        Most nodes, root included.
    max_depth : int, optional
        Deepest level; the model's levels bound it in any case.
    max_rank : int, optional
        Largest rank in any path.
    rank_caps : tuple of int
        Entry d - 1 is the largest rank at depth d; deeper levels have no cap.
    max_children : int, optional
        Most children of any node.
    level_caps : tuple of int
        Entry d - 1 is the largest number of nodes at depth d; deeper levels have no cap.
    dense_siblings : bool
        A node of rank r needs its siblings of ranks 0 … r - 1.
    level_regular : bool
        All nodes of a level have equally many children.
    must_include : tuple of paths
        Nodes that the tree holds, with their ancestors, even at probability 0.
    max_leaves : int, optional
        Most leaves; the root alone is one leaf.

    Raises
    ------
    ConstraintError
        For a value that is no limit, and for `must_include` that contradicts another limit: the text names both.
        No other limits contradict each other, since the root alone obeys them.

    Examples
    --------
    >>> Limits(num_nodes=4, max_depth=1, must_include=((0, 0),))
    Traceback (most recent call last):
    treeopt.errors.ConstraintError: `must_include` holds (0,0), deeper than `max_depth` 1; raise that to 2 or drop the path
    """

    num_nodes: int
    max_depth: int | None = None
    max_rank: int | None = None
    rank_caps: tuple[int, ...] = ()
    max_children: int | None = None
    level_caps: tuple[int, ...] = ()
    dense_siblings: bool = False
    level_regular: bool = False
    must_include: tuple[Path, ...] = ()
    max_leaves: int | None = None

    def __post_init__(self) -> None:
        least = {"num_nodes": 1, "max_depth": 0, "max_rank": 0, "max_children": 0, "max_leaves": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None or name == "num_nodes":
                self._set(name, _whole(name, value, smallest))
        for name in ("rank_caps", "level_caps"):
            caps = _sequence(name, getattr(self, name), "one whole number a depth")
            self._set(name, tuple(_whole(f"{name}[{i}]", cap, 0) for i, cap in enumerate(caps)))
        for name in ("dense_siblings", "level_regular"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ConstraintError(f"`{name}` is {getattr(self, name)!r}; give True or False")
            self._set(name, bool(getattr(self, name)))
        paths = _sequence("must_include", self.must_include, "a list of paths")
        self._set("must_include", tuple(_path(f"must_include[{i}]", path) for i, path in enumerate(paths)))
        for path in self.must_include:
            self._check_path(path)
        self._check_required()

    def rank_cap(self, depth: int) -> int | None:
        """Return the largest rank allowed at a depth, from 1, or None."""
        caps = [cap for cap in (self.max_rank, *self.rank_caps[depth - 1 : depth]) if cap is not None]
        return min(caps, default=None)

    def level_cap(self, depth: int) -> int:
        """Return the largest number of nodes at a depth, from 1, that `level_caps`, `max_leaves` and the budget allow."""
        # No node of a level is below another, so a tree has at least as many leaves as any level has nodes.
        caps = (self.num_nodes - 1, self.max_leaves, *self.level_caps[depth - 1 : depth])
        return min(cap for cap in caps if cap is not None)

    def child_cap(self, depth: int) -> int:
        """Return the largest number of children at a depth, from 1, that one parent can have."""
        return min(self.level_cap(depth), self.num_nodes if self.max_children is None else self.max_children)

    @cached_property
    def required(self) -> frozenset[Path]:
        """Nodes that every tree holds: `must_include`, ancestors and, if siblings are dense, all to the left."""
        return closed(self.must_include, dense_siblings=self.dense_siblings)

    @cached_property
    def required_widths(self) -> tuple[int, ...]:
        """For each level of the required nodes, the most of them below one parent."""
        widths = [0] * max(map(len, self.required), default=0)
        for parent, count in Counter(path[:-1] for path in self.required).items():
            widths[len(parent)] = max(widths[len(parent)], count)
        return tuple(widths)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the limits given beside the budget."""
        return tuple(f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default)

    def without(self, *names: str) -> Limits:
        """Return the limits with some left out."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in names}
        return replace(self, **defaults)

    def check(self, tree: DraftTree) -> None:
        """Check that a tree obeys.

        Raises
        ------
        ConstraintError
            Naming the limit and a node or level that breaks it.

        Examples
        --------
        >>> tree = DraftTree.from_paths([(0,), (2,), (0, 0)])
        >>> Limits(num_nodes=8, dense_siblings=True).check(tree)
        Traceback (most recent call last):
        treeopt.errors.ConstraintError: `dense_siblings` needs node (1), the left sibling of (2); add it
        """
        for complaint in self.complaints(tree):
            raise ConstraintError(complaint)

    def complaints(self, tree: DraftTree) -> Iterator[str]:
        """Yield every way in which a tree does not obey, as `check` would say it."""
        if tree.num_nodes > self.num_nodes:
            yield f"`num_nodes` is {self.num_nodes}, but the tree has {tree.num_nodes}; raise that or drop nodes"
        if self.max_depth is not None and tree.max_depth > self.max_depth:
            yield f"`max_depth` is {self.max_depth}, but the tree has depth {tree.max_depth}; prune it"
        for path in tree.paths[1:]:
            cap = self.rank_cap(len(path))
            if cap is not None and path[-1] > cap:
                name = "max_rank" if cap == self.max_rank else "rank_caps"
                yield f"`{name}` allows rank {cap} at depth {len(path)}, but the tree holds {format_path(path)}; prune it"
        for depth, (width, most) in enumerate(zip(tree.level_widths, self.level_caps), 1):
            if width > most:
                yield f"`level_caps` allows {most} nodes at depth {depth}, but the tree has {width}; drop some"
        if self.max_leaves is not None and len(tree.leaves) > self.max_leaves:
            yield f"`max_leaves` is {self.max_leaves}, but the tree has {len(tree.leaves)} leaves; drop some"
        yield from self._sibling_complaints(tree)
        held = set(tree.paths)
        for path in self.must_include:
            if path not in held:
                yield f"`must_include` names {format_path(path)}, which the tree lacks; add it"

    def _sibling_complaints(self, tree: DraftTree) -> Iterator[str]:
        children = np.bincount(tree.parents[1:], minlength=tree.num_nodes)
        if self.max_children is not None and children.max() > self.max_children:
            path, count = tree.paths[int(children.argmax())], int(children.max())
            yield f"`max_children` is {self.max_children}, but node {format_path(path)} has {count}; drop some"
        if self.dense_siblings:
            held = set(tree.paths)
            for path in tree.paths[1:]:
                left = (*path[:-1], path[-1] - 1)
                if path[-1] > 0 and left not in held:
                    yield f"`dense_siblings` needs node {format_path(left)}, the left sibling of {format_path(path)}; add it"
        if self.level_regular:
            for depth in range(tree.max_depth + 1):
                level = np.flatnonzero(tree.depths == depth)
                counts = children[level]
                if (counts != counts[0]).any():
                    first, other = tree.paths[level[0]], tree.paths[int(level[(counts != counts[0]).argmax()])]
                    yield (
                        f"`level_regular` needs equally many children at level {depth}, but {format_path(first)} has "
                        f"{counts[0]} and {format_path(other)} has {children[tree.paths.index(other)]}; even the level out"
                    )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_path(self, path: Path) -> None:
        named = f"`must_include` holds {format_path(path)}"
        if self.max_depth is not None and len(path) > self.max_depth:
            raise ConstraintError(
                f"{named}, deeper than `max_depth` {self.max_depth}; raise that to {len(path)} or drop the path"
            )
        for depth, rank in enumerate(path, 1):
            if self.max_rank is not None and rank > self.max_rank:
                raise ConstraintError(f"{named}, whose rank {rank} is over `max_rank` {self.max_rank}; raise that")
            cap = self.rank_cap(depth)
            if cap is not None and rank > cap:
                raise ConstraintError(
                    f"{named}, whose rank {rank} at depth {depth} is over `rank_caps` {self.rank_caps}; raise entry {depth}"
                )
        # Before `required` lists them: a path of one large rank needs as many siblings.
        nodes = 1 + (sum(path) if self.dense_siblings else 0) + len(path)
        if nodes > self.num_nodes:
            raise self._contradiction(f"needs {nodes} nodes, root included", "num_nodes")

    def _check_required(self) -> None:
        """Compare the smallest tree that holds the required nodes with every limit: if it obeys, some tree does."""
        levels = Counter(map(len, self.required))
        sizes = [levels[depth] for depth in range(1, len(levels) + 1)]
        leaves = len(self.required - {path[:-1] for path in self.required})
        regular = self.level_regular
        if regular:
            sizes = [math.prod(self.required_widths[: depth + 1]) for depth in range(len(sizes))]
            leaves = sizes[-1] if sizes else 1
        if 1 + sum(sizes) > self.num_nodes:
            raise self._contradiction(f"needs {1 + sum(sizes)} nodes, root included", "num_nodes", regular=regular)
        if self.max_children is not None and max(self.required_widths, default=0) > self.max_children:
            raise self._contradiction(f"needs {max(self.required_widths)} children of one node", "max_children")
        for depth, (size, cap) in enumerate(zip(sizes, self.level_caps), 1):
            if size > cap:
                raise self._contradiction(f"needs {size} nodes at depth {depth}", "level_caps", regular=regular)
        if self.max_leaves is not None and leaves > self.max_leaves:
            raise self._contradiction(f"needs {leaves} leaves", "max_leaves", regular=regular)

    def _contradiction(self, needs: str, name: str, *, regular: bool = False) -> ConstraintError:
        also = [f"`{also}`" for also, on in (("dense_siblings", self.dense_siblings), ("level_regular", regular)) if on]
        subject = " with ".join(["`must_include`", " and ".join(also)] if also else ["`must_include`"])
        return ConstraintError(f"{subject} {needs}, but `{name}` is {getattr(self, name)}; raise that or drop paths")


def _whole(name: str, value: Any, smallest: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = smallest - 1
    if number < smallest or isinstance(value, (bool, np.bool_)):
        raise ConstraintError(f"`{name}` is {value!r}; give a whole number from {smallest} on")
    return number


def _sequence(name: str, value: Any, what: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise ConstraintError(f"`{name}` is {value!r}; give {what}")
    return list(value)


def _path(name: str, given: Any) -> Path:
    ranks = _sequence(name, given, "a path such as (0,) or (0, 1)")
    if not ranks:
        raise ConstraintError(f"`{name}` is the root, which every tree has; leave it out")
    return tuple(_whole(f"{name}[{depth}]", rank, 0) for depth, rank in enumerate(ranks))
