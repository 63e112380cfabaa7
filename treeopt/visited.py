"""A tree for the positions that decoding visits, rather than for all of them.

A decode jumps over what it accepts, and so stands at hard positions more often than at easy ones. Where it stands depends
on the tree; so tree and positions are found in turns.
"""

from __future__ import annotations

from collections.abc import Mapping

from treeopt.optimize.build import certified
from treeopt.optimize.built import BuiltTree
from treeopt.optimize.from_trace import Aim, counted_model, tree_from_trace
from treeopt.optimize.limits import Limits
from treeopt.optimize.otherwise import chosen_otherwise
from treeopt.replays import Replay, replay, visited_positions
from treeopt.trace import RankTrace

__all__ = ["tree_for_steps"]

MAX_ROUNDS = 8  # trees repeat after two or three


def tree_for_steps(
    trace: RankTrace,
    limits: Limits,
    model: str = "independent",
    *,
    seed: int = 0,
    provenance: Mapping[str, str] | None = None,
) -> tuple[BuiltTree, Replay]:
    """Return the tree with the most replayed tokens a step among those that visited positions suggest.

    The first is the tree of largest E[L] over all positions; each next one is built from the positions at which decoding
    with the last takes its steps, until a tree comes again. No tree is claimed to be the best of all.

    Parameters
    ----------
    trace : RankTrace
    limits : Limits
    model : {'independent', 'joint'}
    seed : int
        Of the bootstrap over documents.
    provenance : mapping of str to str, optional

    Returns
    -------
    BuiltTree
        Its path probabilities and E[L] are over all positions; its certificate's value is the replayed tokens a step,
        less one.
    Replay
        Of that tree on the trace.
    """
    aim = Aim(model=model)
    tree = tree_from_trace(trace, limits, aim, certify=False).tree
    tried = {tree: replay(tree, trace)}
    for _ in range(MAX_ROUNDS):
        visited = trace.at(visited_positions(tree, trace))
        if not (visited.ranks >= 0).any(axis=0).all():
            break  # decoding never stands where the last head has a token: nothing can be counted
        tree = tree_from_trace(visited, limits, aim, certify=False).tree
        if tree in tried:
            break
        tried[tree] = replay(tree, trace)
    best = max(tried, key=lambda one: tried[one].tokens_per_step)  # the first of equals
    found, sample = counted_model(trace, model)
    # Every step could at most accept a node of every level.
    deepest = float(
        min(limit for limit in (trace.num_heads, limits.max_depth, limits.num_nodes - 1) if limit is not None)
    )
    built = chosen_otherwise(
        best,
        found,
        limits,
        "tokens_per_step",
        tried[best].tokens_per_step - 1.0,
        deepest,
        provenance={**(provenance or {}), "model": model},
    )
    return certified(built, found, [sample], seed=seed), tried[best]
