"""Defects of what a tree file claims beside the tree: constraints, certificate, provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treeopt.checking.lists import is_number
from treeopt.document import CERTIFICATE_KEYS, CONSTRAINT_KEYS, OBJECTIVES, TOLERANCE
from treeopt.errors import ConstraintError
from treeopt.optimize.built import SUMS
from treeopt.optimize.limits import Limits
from treeopt.paths import Path
from treeopt.tree import DraftTree

__all__ = ["claim_defects"]


def claim_defects(data: Mapping[str, Any], paths: Sequence[Path] | None) -> Iterator[str]:
    """Yield the defects of a file's claims; the paths, where they make a tree, are held against the constraints."""
    yield from _constraints(data, paths)
    yield from _certificate(data)
    provenance = data.get("provenance", {})
    if not isinstance(provenance, dict):
        yield f"`provenance` is {provenance!r:.40}; give an object from text to text"
        return
    for key, value in provenance.items():
        if not isinstance(value, str):
            yield f"`provenance.{key}` is {value!r:.40}; give text"


def _keys(data: Mapping[str, Any], name: str, keys: Sequence[str]) -> Iterator[str]:
    found = data.get(name)
    if name not in data:
        return
    if not isinstance(found, dict):
        yield f"`{name}` is {found!r:.40}; give an object"
        return
    for key in sorted(set(found) - set(keys)):
        yield f"`{name}.{key}` is not a key of {name}; delete it"
    for key in keys:
        if key not in found:
            yield f"`{name}.{key}` is missing; write the file again"


def _constraints(data: Mapping[str, Any], paths: Sequence[Path] | None) -> Iterator[str]:
    wrong = list(_keys(data, "constraints", CONSTRAINT_KEYS))
    yield from wrong
    if wrong or "constraints" not in data:
        return
    found = data["constraints"]
    if not is_number(found["num_nodes"]):
        yield f"in `constraints`, `num_nodes` is {found['num_nodes']!r:.40}; give a whole number from 1 on"
        return
    try:
        # First without the paths that must be there: what they need is no larger than a tree that obeys.
        limits = Limits(**{**found, "must_include": ()})
    except ConstraintError as error:
        yield f"in `constraints`, {error}"
        return
    if paths is None:
        return
    for complaint in limits.complaints(DraftTree.from_paths(paths[1:])):
        yield f"in `constraints`, {complaint}"
    must = found["must_include"]
    if not isinstance(must, list):
        yield f"in `constraints`, must_include is {must!r:.40}; give a list of paths"
        return
    for path in must:
        whole = isinstance(path, list) and bool(path) and all(type(rank) is int for rank in path)
        if not whole or tuple(path) not in set(paths):
            yield f"in `constraints`, must_include names {path!r:.40}, which is no node of the tree; add it or drop the path"


def _certificate(data: Mapping[str, Any]) -> Iterator[str]:
    wrong = list(_keys(data, "certificate", CERTIFICATE_KEYS))
    yield from wrong
    if wrong or "certificate" not in data:
        return
    found = data["certificate"]
    if found["objective"] not in OBJECTIVES:
        yield f"`certificate.objective` is {found['objective']!r}; give one of {', '.join(OBJECTIVES)}"
    for key in ("optimal", "nested"):
        if type(found[key]) is not bool:
            yield f"`certificate.{key}` is {found[key]!r}; give true or false"
    most = _most(data)
    for key in ("value", "upper_bound", "unconstrained_value"):
        yield from _number(f"certificate.{key}", found[key], most)
    for key in ("last_included", "first_excluded"):
        yield from _number(f"certificate.{key}", found[key], 1.0)
    for key in ("constraint_costs", "parts"):
        if not isinstance(found[key], dict):
            yield f"`certificate.{key}` is {found[key]!r:.40}; give an object of numbers"
            continue
        for name, value in found[key].items():
            yield from _number(f"certificate.{key}.{name}", value, most)
    yield from _bounds(data, found)
    yield from _noise(found)


def _most(data: Mapping[str, Any]) -> float:
    constraints = data.get("constraints")
    budget = constraints.get("num_nodes") if isinstance(constraints, dict) else None
    return float(budget) if isinstance(budget, int) and is_number(budget) else float("inf")


def _number(where: str, value: Any, highest: float) -> Iterator[str]:
    if not is_number(value) or not 0 <= value <= highest:
        yield f"`{where}` is {value!r:.40}; give a number from 0 to {highest:g}"


def _bounds(data: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    value, bound = found["value"], found["upper_bound"]
    if is_number(value) and is_number(bound):
        if bound < value:
            yield f"`certificate.upper_bound` is {bound}, below the value {value}; write the file again"
        elif found["optimal"] is True and bound != value:
            yield f"`certificate.optimal` is true, but the bound {bound} is above the value {value}; write the file again"
    expected = data.get("expected_accepted")
    if found["objective"] in SUMS and is_number(value) and is_number(expected) and abs(value - expected) > TOLERANCE:
        yield f"`certificate.value` is {value}, but `expected_accepted` is {expected}; write the file again"
    probabilities = data.get("path_probabilities")
    if isinstance(probabilities, list) and probabilities and all(map(is_number, probabilities)):
        last = min(probabilities)
        if is_number(found["last_included"]) and abs(found["last_included"] - last) > TOLERANCE:
            yield f"`certificate.last_included` is {found['last_included']}, but the smallest probability is {last}; write the file again"


def _noise(found: Mapping[str, Any]) -> Iterator[str]:
    interval, within = found["expected_accepted_interval"], found["nodes_within_noise"]
    pair = isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval))
    if interval is not None and not (pair and 0 <= interval[0] <= interval[1]):
        yield f"`certificate.expected_accepted_interval` is {interval!r:.40}; give null or two numbers, the lower first"
    if within is not None and not (type(within) is int and within >= 0):
        yield f"`certificate.nodes_within_noise` is {within!r:.40}; give null or a whole number"
    if interval is None and within is not None:
        yield "`certificate.nodes_within_noise` stands without `expected_accepted_interval`; give both or neither"
