"""Traces of separate runs joined into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from treeopt.errors import TraceError
from treeopt.trace import RankTrace

__all__ = ["merge_traces"]

REQUIRED = ("target_hash", "heads_hash", "prompts_hash")
SETTINGS = ("dtype", "continuations", "max_new_tokens", "acceptance_rule")
SEPARATOR = ", "


def merge_traces(traces: Sequence[RankTrace], names: Sequence[str]) -> tuple[RankTrace, list[str]]:
    """Join traces of the same target, heads and settings along other prompts, document after document.

    Parameters
    ----------
    traces : sequence of RankTrace
        At least two.
    names : sequence of str
        What to call each in an error.

    Returns
    -------
    RankTrace
        Documents in the order given. What differs in the metadata stands there with all its values.
    list of str
        Sentences about what only some of the traces had, which is left out.

    Raises
    ------
    TraceError
        If targets, heads or settings differ, or a prompt is in two traces.
    """
    if len(traces) < 2:
        raise TraceError(f"`{SEPARATOR.join(names)}` is {len(traces)} trace; give two or more to merge")
    for trace, name in zip(traces, names):
        _refuse_unknown(trace, name)
    for (first, a), (second, b) in combinations(list(zip(traces, names)), 2):
        _refuse_different(first, a, second, b)
        _refuse_repeated(first, a, second, b)
    dropped = dict(_dropped(traces, names))
    starts = np.cumsum([0, *(trace.num_positions for trace in traces)])
    offsets = [trace.documents[1:] + start for trace, start in zip(traces, starts)]
    domains = [domain for trace in traces for domain in trace.domains or ()]
    without = {"temperature"} if "topk_probs" in dropped else set()
    merged = RankTrace(
        np.concatenate([trace.ranks for trace in traces]),
        np.concatenate([[0], *offsets]),
        None if "domains" in dropped or traces[0].domains is None else domains,
        {key: value for key, value in _metadata(traces) if key not in without},
        *(None if name in dropped else _joined(traces, name) for name in ("topk_probs", "entropies", "prompts")),
    )
    return merged, list(filter(None, dropped.values()))


def _refuse_unknown(trace: RankTrace, name: str) -> None:
    missing = [key for key in REQUIRED if not trace.metadata.get(key)]
    if missing:
        raise TraceError(f"`{name}` does not state its {missing[0]}; only traces of treeopt calibrate can be merged")


def _refuse_different(first: RankTrace, a: str, second: RankTrace, b: str) -> None:
    for key in ("target", "heads"):
        if first.metadata[f"{key}_hash"] != second.metadata[f"{key}_hash"]:
            x, y = (f"{one.metadata.get(key) or 'one'} ({one.metadata[f'{key}_hash']})" for one in (first, second))
            raise TraceError(f"`{a}` and `{b}` have different {key}: {x} and {y}; merge traces of one and the same")
    settings = [*SETTINGS, *(["temperature"] if _judged(first) and _judged(second) else [])]
    for key in settings:
        x, y = (one.metadata.get(key, "nothing") for one in (first, second))
        if x != y:
            raise TraceError(f"`{a}` and `{b}` were calibrated with different {key}: {x} and {y}; calibrate one anew")
    if first.num_heads != second.num_heads:
        raise TraceError(f"`{a}` has {first.num_heads} heads, `{b}` {second.num_heads}; merge traces of the same heads")


def _judged(trace: RankTrace) -> bool:
    return trace.topk_probs is not None


def _refuse_repeated(first: RankTrace, a: str, second: RankTrace, b: str) -> None:
    """Refuse prompts in both: their positions would count twice."""
    files = [set(one.metadata["prompts_hash"].split(SEPARATOR)) for one in (first, second)]
    if common := sorted(files[0] & files[1]):
        raise TraceError(f"`{a}` and `{b}` both hold the prompts {common[0]}; merge each trace once")
    if first.prompts is None or second.prompts is None:
        return
    again = np.flatnonzero(np.isin(second.prompts, first.prompts))
    if len(again):
        where = int(np.flatnonzero(first.prompts == second.prompts[again[0]])[0])
        raise TraceError(
            f"`{a}` and `{b}` share {len(again)} prompts, document {where} of the one and {again[0]} of the other first; "
            "calibrate the second on other prompts"
        )


def _dropped(traces: Sequence[RankTrace], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arrays that the merged trace cannot have, each with a sentence if one of the traces has it."""
    for field, what in (("domains", "domains"), ("topk_probs", "probabilities of guesses"), ("prompts", "prompt keys")):
        shapes = [_shape(trace, field) for trace in traces]
        if len(set(shapes)) > 1:
            told = SEPARATOR.join(f"`{name}` {_told(shape)}" for name, shape in zip(names, shapes))
            said = f"the merged trace has no {what}: {told}"
        elif shapes[0] is None:
            said = ""
        else:
            continue
        yield field, said
        if field == "topk_probs":
            yield "entropies", ""


def _shape(trace: RankTrace, field: str) -> int | None:
    """Return what arrays must have in common to be joined, None if there is none."""
    found = getattr(trace, field)
    if found is None:
        return None
    return int(trace.topk_probs.shape[2]) if field == "topk_probs" and trace.topk_probs is not None else 0


def _told(shape: int | None) -> str:
    return "has none" if shape is None else f"has {shape} a head" if shape else "has them"


def _joined(traces: Sequence[RankTrace], field: str) -> np.ndarray:
    return np.concatenate([getattr(trace, field) for trace in traces])


def _metadata(traces: Sequence[RankTrace]) -> Iterator[tuple[str, str]]:
    """Yield every key that all traces have, with all their values."""
    for key in traces[0].metadata:
        if all(key in trace.metadata for trace in traces):
            values = [value for trace in traces for value in trace.metadata[key].split(SEPARATOR)]
            yield key, SEPARATOR.join(dict.fromkeys(values))
