"""Latency curves: what a verification pass costs at every number of nodes, on a machine that was measured."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt import strictjson
from treeopt.errors import LatencyError
from treeopt.files import replacing

__all__ = ["SCHEMA", "LatencyCurve", "LatencyTable"]

SCHEMA = "treeopt.latency/1"
BETWEEN = ("linear", "step")

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LatencyCurve:
    """Time of one step against the number of nodes, at one batch size and context length.

    Attributes
    ----------
    nodes : ndarray of int64, ascending
        Measured budgets, root included.
    seconds : ndarray of float64
        One verification pass of as many nodes, in s, without drafting.
    plain_seconds : float
        One step of plain decoding, in s.
    draft_seconds : tuple of float
        Entry d - 1 is what drafting d levels takes, in s; the last stands for every deeper level. Empty for nothing.
    batch : int
        Sequences decoded together.
    context : int
        Tokens before the tree.
    between : {'linear', 'step'}
        Between two measured budgets the time is interpolated, or is that of the larger one: buckets of CUDA graphs.
    quartiles : tuple of pairs of float
        First and third quartile of the whole step at each budget, in s, where it was measured so.
    """

    nodes: NDArray[np.int64]
    seconds: Seconds
    plain_seconds: float
    draft_seconds: tuple[float, ...] = ()
    batch: int = 1
    context: int = 0
    between: str = "linear"
    quartiles: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(
        cls,
        nodes: ArrayLike,
        seconds: ArrayLike,
        *,
        plain_seconds: float | None = None,
        draft_seconds: Sequence[float] | float = (),
        batch: int = 1,
        context: int = 0,
        between: str = "linear",
        quartiles: Sequence[Sequence[float]] = (),
    ) -> LatencyCurve:
        """Build a curve and check it; without `plain_seconds` a plain step takes what the pass of one node does.

        Raises
        ------
        LatencyError
            For budgets that do not ascend from 1 on, times that are not positive, or lists of different lengths.

        Examples
        --------
        >>> LatencyCurve.of([1, 4], [1.0, 2.5]).at([2, 4]).tolist()
        [1.5, 2.5]
        """
        budgets, times = np.asarray(nodes), np.asarray(seconds, dtype=np.float64)
        if budgets.ndim != 1 or budgets.shape != times.shape or not budgets.size:
            raise LatencyError(
                f"`nodes` has shape {budgets.shape} and `seconds` {times.shape}; give two lists of one length"
            )
        if not np.issubdtype(budgets.dtype, np.integer) or budgets[0] < 1 or (np.diff(budgets) <= 0).any():
            raise LatencyError("`nodes` must be whole numbers that ascend from 1 on; sort them and drop repeats")
        if plain_seconds is None and budgets[0] != 1:
            raise LatencyError("`plain_seconds` is missing and no pass of 1 node was measured; give one of the two")
        plain = float(times[0]) if plain_seconds is None else float(plain_seconds)
        drafting = (draft_seconds,) if isinstance(draft_seconds, (int, float)) else tuple(map(float, draft_seconds))
        if not (np.isfinite(times).all() and (times > 0).all() and np.isfinite(plain) and plain > 0):
            raise LatencyError("`seconds` must be positive and finite; measure again")
        if not (np.isfinite(drafting).all() and all(time >= 0 for time in drafting)):
            raise LatencyError("`draft_seconds` must be finite and not negative; measure again")
        for name, value, least in (("batch", batch, 1), ("context", context, 0)):
            if type(value) is not int or value < least:
                raise LatencyError(f"`{name}` is {value!r}; give a whole number from {least} on")
        if between not in BETWEEN:
            raise LatencyError(f"`between` is {between!r}; give one of {', '.join(BETWEEN)}")
        spread = tuple((float(low), float(high)) for low, high in quartiles)
        return cls(budgets.astype(np.int64), times, plain, drafting, batch, context, between, spread)

    @property
    def max_nodes(self) -> int:
        """Largest budget measured: nothing is known beyond."""
        return int(self.nodes[-1])

    def at(self, nodes: ArrayLike) -> Seconds:
        """Return the time of passes of some numbers of nodes, each at most `max_nodes`, in s."""
        wanted = np.asarray(nodes)
        if self.between == "step":
            return self.seconds[np.searchsorted(self.nodes, wanted)]
        times: Seconds = np.interp(wanted, self.nodes, self.seconds)
        return times

    def drafting(self, depths: ArrayLike) -> Seconds:
        """Return what drafting some numbers of levels takes, in s."""
        levels = np.asarray(depths)
        if not self.draft_seconds:
            return np.zeros(levels.shape)
        table = np.array([0.0, *self.draft_seconds])
        times: Seconds = table[np.minimum(levels, len(self.draft_seconds))]
        return times


@dataclass(frozen=True)
class LatencyTable:
    """Curves of one machine at several batch sizes and contexts.

    Attributes
    ----------
    curves : tuple of LatencyCurve
    metadata : mapping of str to str
        Device, versions, dtype, where the numbers come from.
    """

    curves: tuple[LatencyCurve, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def curve(self, batch: int = 1, context: int | None = None) -> LatencyCurve:
        """Return the curve of a batch size and of the measured context nearest to the one asked for.

        Raises
        ------
        LatencyError
            If nothing was measured at this batch size.
        """
        fitting = [curve for curve in self.curves if curve.batch == batch]
        if not fitting:
            known = ", ".join(str(size) for size in sorted({curve.batch for curve in self.curves}))
            raise LatencyError(f"`batch` {batch} was not measured; the file has {known}")
        if context is None:
            return min(fitting, key=lambda curve: curve.context)
        return min(fitting, key=lambda curve: (abs(curve.context - context), curve.context))

    def write(self, path: str | Path) -> None:
        """Write a JSON file of schema ``treeopt.latency/1``; an interruption leaves the old one whole."""
        rows = [
            {
                "batch": curve.batch,
                "context": curve.context,
                "nodes": curve.nodes.tolist(),
                "seconds": curve.seconds.tolist(),
                "plain_seconds": curve.plain_seconds,
                "draft_seconds": list(curve.draft_seconds),
                "between": curve.between,
                "quartiles": [list(pair) for pair in curve.quartiles],
            }
            for curve in self.curves
        ]
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        text = f'{{\n "schema": "{SCHEMA}",\n "metadata": {json.dumps(dict(self.metadata))},\n "curves": [\n{lines}\n ]\n}}\n'
        with replacing(Path(path)) as temporary:
            temporary.write_text(text, encoding="utf8")

    @classmethod
    def read(cls, path: str | Path, *, model: str | None = None) -> LatencyTable:
        """Read curves: JSON of schema ``treeopt.latency/1``, a CSV table, or JSON of CaDDTree's cost models.

        Parameters
        ----------
        path : str or Path
            A CSV has a header with `nodes` and `seconds`, and may have `batch`, `context`.
        model : str, optional
            Which one, if the file holds curves of several.

        Raises
        ------
        LatencyError
            If the file is none of these or holds curves that make no sense.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise LatencyError(f"`{path}` cannot be read: {error.strerror}; make one with treeopt profile") from error
        try:
            if data.lstrip()[:1] == b"{":
                return _from_json(strictjson.parse(data), model)
            return _from_csv(data.decode("utf8"))
        except LatencyError as error:
            raise LatencyError(f"`{path}`: {error}") from error
        except (ValueError, OverflowError) as error:
            raise LatencyError(f"`{path}` is no table of latencies: {error}; make one with treeopt profile") from error


def _from_json(data: Any, model: str | None) -> LatencyTable:
    if "models" in data:
        return _from_cost_models(data, model)
    if data.get("schema") != SCHEMA:
        raise LatencyError(f"`schema` is {data.get('schema')!r}, not {SCHEMA!r}; make a file with treeopt profile")
    metadata, rows = data.get("metadata", {}), data.get("curves")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise LatencyError("`metadata` must map text to text")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise LatencyError("`curves` must be a list of objects; measure again")
    try:
        return LatencyTable(tuple(LatencyCurve.of(**row) for row in rows), metadata)
    except TypeError as error:
        raise LatencyError(f"a curve has missing, unknown or misshapen keys ({error}); measure again") from error


def _from_cost_models(data: Any, model: str | None) -> LatencyTable:
    """Read verify latency against drafted nodes, root excluded, by context: the form of CaDDTree's cost models."""
    models = data["models"]
    name = model if model is not None else next(iter(models)) if len(models) == 1 else None
    if name not in models:
        raise LatencyError(f"`model` is {name}; the file has {', '.join(models)}; name one of them")
    found = models[name]
    try:
        curves = tuple(
            LatencyCurve.of(
                np.asarray(curve["n"]) + 1,
                curve["latency_s"],
                draft_seconds=found["draft_cost_s"],
                context=int(context),
            )
            for context, curve in found["curves"].items()
        )
    except (KeyError, TypeError) as error:
        raise LatencyError(
            f"`{name}` lacks {error}; give curves with `n` and `latency_s`, and `draft_cost_s`"
        ) from error
    return LatencyTable(curves, {"source": str(data.get("source", "")), "model": str(name)})


def _from_csv(text: str) -> LatencyTable:
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not {"nodes", "seconds"} <= set(rows[0]):
        raise LatencyError("the table needs a header with `nodes` and `seconds`; batch and context are optional")
    groups: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for row in rows:
        key = int(row.get("batch") or 1), int(row.get("context") or 0)
        groups.setdefault(key, []).append((int(row["nodes"]), float(row["seconds"])))
    curves = []
    for (batch, context), points in sorted(groups.items()):
        nodes, seconds = zip(*sorted(points))
        curves.append(LatencyCurve.of(nodes, seconds, batch=batch, context=context))
    return LatencyTable(tuple(curves), {})
