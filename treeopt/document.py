"""The tree file: one JSON document with everything a decoder needs, in canonical bytes.

Equal trees give equal files: keys in a fixed order, floats in their shortest form, one key a line. Reading refuses what
a careless writer produces, each defect with its own error, and checks every derived array against the paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from treeopt import strictjson
from treeopt.buffers import TreeBuffers
from treeopt.errors import ConstraintError, DocumentError, TreeError
from treeopt.files import replacing
from treeopt.optimize.built import SUMS, BuiltTree, Certificate
from treeopt.optimize.limits import Limits
from treeopt.optimize.noise import Noise
from treeopt.tree import DraftTree

__all__ = ["SCHEMA", "from_json", "read_tree", "to_bytes", "write_tree"]

SCHEMA = "treeopt.tree/1"
MAX_BYTES = 64 << 20
MAX_DENSE_NODES = 512  # above, the mask is written packed only: a dense one of 4,681 nodes is 44 MB of text
TOLERANCE = 1e-9  # between a stated E[L] and the sum of the stated probabilities

STRUCTURE = ("num_nodes", "max_depth", "paths", "parents", "depths", "ranks", "position_ids")
MASKS = ("attention_mask", "packed_mask", "retrieve", "retrieve_valid")
VALUES = ("expected_accepted", "tokens_per_step", "path_probabilities", "added", "curve")
KEYS = ("schema", *STRUCTURE, *MASKS, *VALUES, "constraints", "certificate", "provenance")
CONSTRAINT_KEYS = tuple(field.name for field in fields(Limits))
CERTIFICATE_KEYS = (
    "objective",
    "value",
    "upper_bound",
    "optimal",
    "nested",
    "last_included",
    "first_excluded",
    "unconstrained_value",
    "constraint_costs",
    "parts",
    "expected_accepted_interval",
    "nodes_within_noise",
)
OBJECTIVES = (*SUMS, "robust", "tokens_per_step", "typical")


def to_bytes(built: BuiltTree) -> bytes:
    """Return the file of a tree as bytes, UTF-8 JSON with a line end."""
    rows = [f"  {json.dumps(key)}: {_compact(value)}" for key, value in _fields(built).items()]
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()


def write_tree(built: BuiltTree, path: str | Path) -> None:
    """Write a tree file; an interruption leaves the old one whole.

    Parameters
    ----------
    built : BuiltTree
    path : str or Path

    Raises
    ------
    DocumentError
        If the file would be larger than a reader takes.
    """
    data = to_bytes(built)
    if len(data) > MAX_BYTES:
        raise DocumentError(
            f"the file of {built.tree.num_nodes} nodes would have {len(data)} bytes, more than the {MAX_BYTES} a reader "
            "takes; build fewer nodes"
        )
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(data)


def read_tree(path: str | Path) -> BuiltTree:
    """Read a tree file and check it.

    Raises
    ------
    DocumentError
        If the file is too large, no JSON, has repeated or unknown or missing keys, holds NaN or infinity, or one of
        its arrays contradicts its paths.
    TreeError
        If its paths are no tree.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DocumentError(f"the file has {size} bytes; a tree file has at most {MAX_BYTES}")
        return from_json(strictjson.parse(path.read_bytes()))
    except OSError as error:
        raise DocumentError(f"`{path}` cannot be read: {error.strerror}; make one with treeopt build") from error
    except (DocumentError, TreeError) as error:
        raise type(error)(f"`{path}`: {error}") from error
    except (ValueError, OverflowError) as error:
        raise DocumentError(f"`{path}` is no tree file: {error}; make one with treeopt build") from error


def from_json(data: Any) -> BuiltTree:
    """Build from parsed JSON; see `read_tree`."""
    _check_keys(data)
    tree = DraftTree.from_paths(_paths(data))
    constraints = _constraints(data, tree)
    provenance = data["provenance"]
    if not isinstance(provenance, dict) or not all(isinstance(value, str) for value in provenance.values()):
        raise DocumentError("`provenance` must map text to text")
    built = BuiltTree(
        tree=tree,
        path_probabilities=_probabilities(data, tree),
        added=_permutation(data, tree),
        constraints=constraints,
        certificate=_certificate(data, float(constraints.num_nodes)),
        provenance=provenance,
    )
    _check_derived(data, built)
    return built


def _fields(built: BuiltTree) -> dict[str, Any]:
    tree, buffers = built.tree, TreeBuffers.of(built.tree)
    dense = tree.num_nodes <= MAX_DENSE_NODES
    return {
        "schema": SCHEMA,
        "num_nodes": tree.num_nodes,
        "max_depth": tree.max_depth,
        "paths": [list(path) for path in tree.paths],
        "parents": tree.parents.tolist(),
        "depths": tree.depths.tolist(),
        "ranks": tree.ranks.tolist(),
        "position_ids": buffers.position_ids.tolist(),
        "attention_mask": buffers.attention_mask.astype(int).tolist() if dense else None,
        "packed_mask": [[f"{word:016x}" for word in row] for row in buffers.packed_mask.tolist()],
        "retrieve": buffers.retrieve.tolist(),
        "retrieve_valid": buffers.retrieve_valid.astype(int).tolist(),
        "expected_accepted": built.expected_accepted,
        "tokens_per_step": built.tokens_per_step,
        "path_probabilities": built.path_probabilities.tolist(),
        "added": built.added.tolist(),
        "curve": built.curve.tolist(),
        "constraints": {name: _plain(getattr(built.constraints, name)) for name in CONSTRAINT_KEYS},
        "certificate": _certificate_fields(built),
        "provenance": dict(sorted(built.provenance.items())),
    }


def _certificate_fields(built: BuiltTree) -> dict[str, Any]:
    proven = built.certificate
    noise = proven.noise
    return {
        "objective": proven.objective,
        "value": proven.value,
        "upper_bound": proven.bound,
        "optimal": proven.optimal,
        "nested": proven.nested,
        "last_included": built.last_included,
        "first_excluded": proven.first_excluded,
        "unconstrained_value": proven.unconstrained,
        "constraint_costs": dict(proven.constraint_costs),
        "parts": dict(sorted(proven.parts.items())),
        "expected_accepted_interval": [noise.low, noise.high] if noise else None,
        "nodes_within_noise": noise.nodes_within_noise if noise else None,
    }


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _check_keys(data: Any) -> None:
    if not isinstance(data, dict):
        raise DocumentError(f"the file holds {type(data).__name__}, not an object; make a tree file with treeopt build")
    if data.get("schema") != SCHEMA:
        raise DocumentError(f"`schema` is {data.get('schema')!r}, not {SCHEMA!r}; this treeopt reads no other")
    unknown = sorted(set(data) - set(KEYS))
    if unknown:
        raise DocumentError(f"`{unknown[0]}` is not a key of {SCHEMA}; delete it")
    missing = [key for key in KEYS if key not in data]
    if missing:
        raise DocumentError(f"`{missing[0]}` is missing; write the file with treeopt.write_tree")


def _paths(data: Mapping[str, Any]) -> list[list[int]]:
    paths = data["paths"]
    if not isinstance(paths, list) or not paths or paths[0] != [] or not all(isinstance(path, list) for path in paths):
        raise DocumentError("`paths` must be a list of lists of ranks that begins with [], the root")
    wrong = next((rank for path in paths for rank in path if type(rank) is not int), None)
    if wrong is not None:
        raise DocumentError(f"`paths` holds {wrong!r}; ranks are whole numbers")
    return paths[1:]


def _object(data: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    found = data[name]
    if not isinstance(found, dict) or set(found) != set(keys):
        raise DocumentError(f"`{name}` must have exactly the keys {', '.join(keys)}")
    return found


def _constraints(data: Mapping[str, Any], tree: DraftTree) -> Limits:
    found = _object(data, "constraints", CONSTRAINT_KEYS)
    try:
        # First without the paths: once the tree is seen to obey, what they need is no larger than the tree.
        Limits(**{**found, "must_include": ()}).check(tree)
        if not isinstance(found["must_include"], list) or any(
            path not in data["paths"] for path in found["must_include"]
        ):
            raise DocumentError(f"in `constraints`, must_include is {found['must_include']!r}; give paths of the tree")
        limits = Limits(**found)
    except ConstraintError as error:
        raise DocumentError(f"in `constraints`, {error}") from error
    return limits


def _certificate(data: Mapping[str, Any], most: float) -> Certificate:
    found = _object(data, "certificate", CERTIFICATE_KEYS)
    value, bound = _number(found, "value", most), _number(found, "upper_bound", most)
    if found["objective"] not in OBJECTIVES:
        raise DocumentError(f"`objective` is {found['objective']!r}; give one of {', '.join(OBJECTIVES)}")
    for name in ("optimal", "nested"):
        if type(found[name]) is not bool:
            raise DocumentError(f"`{name}` is {found[name]!r}; give true or false")
    if bound < value or (found["optimal"] and bound != value):
        raise DocumentError(f"`upper_bound` is {bound:g} for a value of {value:g}; write the file again")
    return Certificate(
        objective=found["objective"],
        value=value,
        bound=bound,
        optimal=found["optimal"],
        nested=found["nested"],
        first_excluded=_number(found, "first_excluded", 1.0),
        unconstrained=_number(found, "unconstrained_value", most),
        constraint_costs=_numbers(found, "constraint_costs", most),
        parts=_numbers(found, "parts", most),
        noise=_noise(found),
    )


def _number(data: Mapping[str, Any], name: str, highest: float) -> float:
    value = data[name]
    if type(value) not in (int, float) or not 0 <= value <= highest:
        raise DocumentError(f"`{name}` is {value!r}; give a number from 0 to {highest:g}")
    return float(value)


def _numbers(data: Mapping[str, Any], name: str, highest: float) -> dict[str, float]:
    found = data[name]
    if not isinstance(found, dict):
        raise DocumentError(f"`{name}` is {found!r}; give an object of numbers")
    return {key: _number(found, key, highest) for key in found}


def _noise(certificate: Mapping[str, Any]) -> Noise | None:
    interval, within = certificate["expected_accepted_interval"], certificate["nodes_within_noise"]
    if interval is None and within is None:
        return None
    numeric = isinstance(interval, list) and [type(value) in (int, float) for value in interval] == [True, True]
    counted = within is None or (type(within) is int and within >= 0)
    if not numeric or not counted or not 0 <= interval[0] <= interval[1]:
        raise DocumentError(
            "`certificate` must give `expected_accepted_interval` as two numbers and `nodes_within_noise`"
        )
    return Noise(float(interval[0]), float(interval[1]), within)


def _probabilities(data: Mapping[str, Any], tree: DraftTree) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = data["path_probabilities"]
    numeric = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not numeric or len(values) != tree.num_nodes:
        raise DocumentError(f"`path_probabilities` must hold {tree.num_nodes} numbers, one a node")
    array = np.array(values, dtype=np.float64)
    if array[0] != 1.0 or not bool(((array >= 0) & (array <= 1)).all()):
        raise DocumentError("`path_probabilities` must lie in [0, 1], the root's being 1")
    above = np.flatnonzero(array[1:] > array[tree.parents[1:]])
    if above.size:
        raise DocumentError(f"node `{above[0] + 1}` is likelier than its parent; probabilities fall along a path")
    return array


def _permutation(data: Mapping[str, Any], tree: DraftTree) -> np.ndarray[Any, np.dtype[np.int64]]:
    values = data["added"]
    whole = isinstance(values, list) and all(type(value) is int for value in values)
    if not whole or sorted(values) != list(range(tree.num_nodes)) or values[0] != 0:
        raise DocumentError(f"`added` must name each node 0 … {tree.num_nodes - 1} once, the root first")
    return np.array(values, dtype=np.int64)


def _check_derived(data: Mapping[str, Any], built: BuiltTree) -> None:
    """Check everything that follows from the paths and probabilities against what the file states."""
    if built.certificate.objective in SUMS and abs(built.certificate.value - built.expected_accepted) > TOLERANCE:
        raise DocumentError("`value` does not follow from `path_probabilities`; write the file again")
    for key, expected in _fields(built).items():
        if key in ("provenance", "constraints"):
            continue
        if not _equal(data[key], expected):
            raise DocumentError(f"`{key}` does not follow from `paths` and `path_probabilities`; write the file again")


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and type(found) in (int, float):
        return bool(abs(found - expected) <= TOLERANCE)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and set(found) == set(expected)
            and all(_equal(found[k], expected[k]) for k in expected)
        )
    return type(found) is type(expected) and bool(found == expected)
