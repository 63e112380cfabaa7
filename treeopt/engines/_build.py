"""Searching under an engine's rules from the start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from treeopt.engines._engine import Engine, Settings
from treeopt.engines._rules import Drafts, MinDepth, Rule
from treeopt.errors import ConstraintError, EngineError
from treeopt.optimize.build import by_probability
from treeopt.optimize.built import SUMS, BuiltTree, expected_accepted
from treeopt.optimize.limits import Limits
from treeopt.paths import Path, format_path

__all__ = ["best_for", "constrained"]

MAX_EXTRA = 64  # larger budgets tried after a mend; each costs a search
ROUNDING = 1e-12  # between the sums of two sets of nodes of one value
CAPS = ("num_nodes", "max_depth", "max_rank")


def constrained(engine: Engine, settings: Settings, limits: Limits, given: Collection[str]) -> Limits:
    """Join limits with those of an engine.

    Parameters
    ----------
    engine : Engine
    settings : mapping
        See `Engine.settings_of`.
    limits : Limits
    given : collection of str
        Names of the limits that somebody asked for; the others give way.

    Raises
    ------
    ConstraintError
        If one that was asked for contradicts the engine's, naming both.
    """
    wanted: dict[str, Any] = {}
    for rule in engine.rules(settings):
        for name, value in rule.limits.items():
            wanted[name] = min(value, wanted.get(name, value)) if name in CAPS else value
    _check(engine, settings, limits, given, wanted)
    changes = {
        name: value if name not in CAPS or getattr(limits, name) is None else min(value, getattr(limits, name))
        for name, value in wanted.items()
    }
    try:
        return replace(limits, **changes)
    except ConstraintError as error:
        asked = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise ConstraintError(f"`--for {engine.name}` asks for {asked}, and then {error}") from error


def _check(engine: Engine, settings: Settings, limits: Limits, given: Collection[str], wanted: dict[str, Any]) -> None:
    for name in CAPS:
        if name in given and name in wanted and getattr(limits, name) > wanted[name]:
            raise _contradiction(engine, f"`{name}` is {getattr(limits, name)}", f"at most {wanted[name]}")
    rank, depth = wanted.get("max_rank"), wanted.get("max_depth")
    for at, cap in enumerate(limits.rank_caps, 1):
        if rank is not None and cap > rank:
            raise _contradiction(engine, f"`rank_caps` allows rank {cap} at depth {at}", f"at most {rank}")
    for path in limits.must_include:
        if rank is not None and max(path) > rank:
            raise _contradiction(engine, f"`must_include` names {format_path(path)}", f"ranks to {rank}")
        if depth is not None and len(path) > depth:
            raise _contradiction(engine, f"`must_include` names {format_path(path)}", f"depth to {depth}")
    for rule in engine.rules(settings):
        least = rule.least if isinstance(rule, MinDepth) else int(isinstance(rule, Drafts))
        if "max_depth" in given and limits.max_depth is not None and limits.max_depth < least:
            raise _contradiction(engine, f"`max_depth` is {limits.max_depth}", f"at least {least}")
        if "num_nodes" in given and limits.num_nodes < least + 1:
            raise _contradiction(engine, f"`num_nodes` is {limits.num_nodes}, root included", f"at least {least + 1}")


def _contradiction(engine: Engine, asked: str, takes: str) -> ConstraintError:
    return ConstraintError(
        f"{asked}, but `--for {engine.name}` takes {takes}; change that limit or drop one of the two"
    )


def best_for(
    engine: Engine, settings: Settings, limits: Limits, build: Callable[[Limits, bool], BuiltTree]
) -> tuple[BuiltTree, str | None]:
    """Build the best tree that an engine takes.

    Parameters
    ----------
    engine : Engine
    settings : mapping
    limits : Limits
        Of `constrained`.
    build : callable
        From limits, and whether to certify, to the best tree under them.

    Returns
    -------
    built : BuiltTree
        Proven as far as its certificate says. What no limits can express is first left to chance, then forced by the
        limits that a rule offers, last mended by leaving nodes out; then the certificate's bound is that of the tree
        before.
    note : str or None
        What was mended.

    Raises
    ------
    EngineError
        If no tree obeys, or one that must be mended was chosen by an objective that only a search can value.
    """
    built = build(limits, True)
    for rule in engine.rules(settings):
        if rule.complaint(built.tree) is None:
            continue
        if options := list(rule.variants(limits)):
            built = max((build(option, True) for option in options), key=lambda one: one.certificate.value)
            continue
        return _mended(engine, rule, built, limits, build)
    return built, None


def _mended(
    engine: Engine, rule: Rule, built: BuiltTree, limits: Limits, build: Callable[[Limits, bool], BuiltTree]
) -> tuple[BuiltTree, str | None]:
    """Leave nodes out, and spend the room on those that a search with a larger budget would take."""
    _check_mend(engine, rule, built)
    best, largest = _part(rule, built, built), limits.num_nodes
    while best.tree.num_nodes < limits.num_nodes and largest < limits.num_nodes + MAX_EXTRA:
        largest += 1
        part = _part(rule, built, build(replace(limits, num_nodes=largest), False))
        if part.tree.num_nodes > limits.num_nodes:
            break
        best = max(best, part, key=lambda one: one.expected_accepted)
    if best.certificate.optimal:
        return best, None
    return best, (
        f"not the best tree of {limits.num_nodes} nodes: {engine.name} asks for {rule.text}, which no search can follow, and "
        f"E[L] {built.expected_accepted:.4f} becomes {best.expected_accepted:.4f}"
    )


def _check_mend(engine: Engine, rule: Rule, built: BuiltTree) -> None:
    mended = rule.mend(built.tree, _weights(built))
    if mended is None or not set(mended.paths) <= set(built.tree.paths):
        raise EngineError(
            f"`--for {engine.name}` finds no tree: {rule.complaint(built.tree)}; allow more nodes or levels"
        )
    if built.certificate.objective not in SUMS:
        raise EngineError(
            f"`--for {engine.name}` must leave nodes out of the best tree, and what that costs under the objective "
            f"{built.certificate.objective} is unknown: {rule.complaint(built.tree)}; build by expected-accepted, or "
            "another tree"
        )


def _part(rule: Rule, built: BuiltTree, source: BuiltTree) -> BuiltTree:
    """Return what a rule leaves of one tree, with what is proven of another, the best within the limits."""
    tree = rule.mend(source.tree, _weights(source))
    assert tree is not None
    assert rule.complaint(tree) is None
    place = {path: node for node, path in enumerate(source.tree.paths)}
    probabilities = source.path_probabilities[[place[path] for path in tree.paths]]
    added = by_probability(probabilities)
    value = expected_accepted(probabilities, added)
    left_out = [source.path_probabilities[place[path]] for path in set(place) - set(tree.paths)]
    proven = built.certificate
    reached = proven.optimal and value >= proven.value - ROUNDING
    certificate = replace(
        proven,
        value=value,
        bound=value if reached else max(proven.bound, value),
        optimal=reached,
        nested=False,
        first_excluded=float(np.max([source.certificate.first_excluded, *left_out])),
        constraint_costs={
            name: max(0.0, cost + proven.value - value) for name, cost in proven.constraint_costs.items()
        },
        parts={},
        noise=None,
    )
    return replace(built, tree=tree, path_probabilities=probabilities, added=added, certificate=certificate)


def _weights(built: BuiltTree) -> dict[Path, float]:
    return dict(zip(built.tree.paths, built.path_probabilities.tolist()))
