"""Rank traces: at every position, the rank each head gave the token that the target produced."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from treeopt import strictjson
from treeopt.acceptance import AcceptanceTable
from treeopt.errors import TraceError
from treeopt.files import replacing
from treeopt.tracechecks import UNOBSERVED, check_offsets, checked_probabilities, checked_prompts, whole_numbers

__all__ = ["NO_GUESS", "RankTrace"]

SCHEMA = "treeopt.trace/1"
DEFAULT_RANKS = 256
# Rank of a token that none of a head's guesses stands for: beyond every tree, and never among the ranks that are counted.
NO_GUESS = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class RankTrace:
    """Ranks of every head along documents that the target produced.

    Row ``i`` of a document stands for a step whose root is the document's token ``i``: the target has decided it, and
    head ``h``, reading the hidden state before it, guesses token ``i + 1 + h``.

    Parameters
    ----------
    ranks : array_like of int32, shape (positions, heads)
        Rank of the true token in the head's guesses, from 0; -1 where the document ends before it, 2147483647 where the
        head's vocabulary lacks it.
    documents : array_like of int64, shape (documents + 1,)
        Document d holds rows documents[d] … documents[d + 1] - 1.
    domains : sequence of str, optional
        Domain of each document.
    metadata : mapping of str to str, optional
        Where the ranks come from.
    topk_probs : array_like of float16, shape (positions, heads, R), optional
        The target's probability of each head's R best guesses, behind the document's own text; 0 where not observed.
    entropies : array_like of float32, shape (positions,), optional
        Entropy in nats of the target's distribution after each row's root, in the same run.
    prompts : array_like of int64, shape (documents,), optional
        A key of each document's prompt: documents of the same prompt have the same; see `treeopt.prompts.prompt_key`.

    Examples
    --------
    >>> trace = RankTrace(ranks=[[0, 2], [1, -1], [-1, -1]], documents=[0, 3])
    >>> trace.num_positions, trace.num_heads, trace.num_documents
    (3, 2, 1)
    >>> trace.table().rates.tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """

    ranks: NDArray[np.int32]
    documents: NDArray[np.int64]
    domains: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    topk_probs: NDArray[np.float16] | None = None
    entropies: NDArray[np.float32] | None = None
    prompts: NDArray[np.int64] | None = None

    def __init__(
        self,
        ranks: ArrayLike,
        documents: ArrayLike,
        domains: Sequence[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        topk_probs: ArrayLike | None = None,
        entropies: ArrayLike | None = None,
        prompts: ArrayLike | None = None,
    ) -> None:
        rank, offsets = whole_numbers(ranks, "ranks"), whole_numbers(documents, "documents")
        check_offsets(rank, offsets, domains)
        for array, name, dtype in ((rank, "ranks", np.int32), (offsets, "documents", np.int64)):
            frozen = array.astype(dtype)
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)
        object.__setattr__(self, "domains", None if domains is None else tuple(domains))
        object.__setattr__(self, "metadata", dict(metadata or {}))
        probs, entropy = checked_probabilities(topk_probs, entropies, rank)
        object.__setattr__(self, "topk_probs", probs)
        object.__setattr__(self, "entropies", entropy)
        object.__setattr__(self, "prompts", checked_prompts(prompts, len(offsets) - 1))

    @property
    def num_positions(self) -> int:
        """Rows of `ranks`."""
        return int(self.ranks.shape[0])

    @property
    def num_heads(self) -> int:
        """Columns of `ranks`."""
        return int(self.ranks.shape[1])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    def table(self, num_ranks: int = DEFAULT_RANKS) -> AcceptanceTable:
        """Count how often each head is right at each rank.

        Parameters
        ----------
        num_ranks : int
            Ranks to count, at most; ranks that no head ever hit at the end are left out.

        Raises
        ------
        TraceError
            If a head was observed nowhere.
        """
        hits, positions = self.counts(num_ranks)
        unseen = np.flatnonzero(positions == 0)
        if unseen.size:
            raise TraceError(f"head `{unseen[0]}` was observed at no position; calibrate on longer continuations")
        return AcceptanceTable.from_counts(hits, positions)

    def counts(self, num_ranks: int = DEFAULT_RANKS) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return hits (heads, ranks) and observed positions (heads,), each head over its own positions."""
        if num_ranks < 1:
            raise TraceError(f"`num_ranks` is {num_ranks}; count at least 1 rank")
        num_ranks = min(num_ranks, int(self.ranks.max(initial=0)) + 1)
        hits = np.zeros((self.num_heads, num_ranks), dtype=np.int64)
        for head, column in enumerate(self.ranks.T):
            shallow = column[(column >= 0) & (column < num_ranks)]
            hits[head] = np.bincount(shallow, minlength=num_ranks)
        return hits, (self.ranks != UNOBSERVED).sum(axis=0)

    def select(self, documents: ArrayLike) -> RankTrace:
        """Return a trace of some documents, in the order given, repeats allowed.

        Parameters
        ----------
        documents : array_like of int
            Indices of documents.
        """
        chosen = np.asarray(documents, dtype=np.int64)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.num_documents):
            raise TraceError(
                f"`documents` must lie in 0 … {self.num_documents - 1}; got {chosen.min()} … {chosen.max()}"
            )
        lengths = np.diff(self.documents)[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.documents[chosen] - offsets[:-1], lengths)
        domains = None if self.domains is None else [self.domains[i] for i in chosen.tolist()]
        probs = None if self.topk_probs is None else self.topk_probs[rows]
        entropies = None if self.entropies is None else self.entropies[rows]
        prompts = None if self.prompts is None else self.prompts[chosen]
        return RankTrace(self.ranks[rows], offsets, domains, self.metadata, probs, entropies, prompts)

    def at(self, positions: ArrayLike) -> RankTrace:
        """Return a trace of some positions of every document; for counting, since what follows a row may be gone.

        Parameters
        ----------
        positions : array_like of bool, shape (positions,)
        """
        kept = np.asarray(positions, dtype=bool)
        if kept.shape != (self.num_positions,):
            raise TraceError(f"`positions` has shape {kept.shape}; give one flag for each of {self.num_positions} rows")
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.documents]
        return RankTrace(self.ranks[kept], offsets, self.domains, self.metadata, prompts=self.prompts)

    def domain(self, name: str) -> RankTrace:
        """Return the trace of one domain's documents.

        Raises
        ------
        TraceError
            If the trace has no domains, or not this one.
        """
        chosen = [i for i, domain in enumerate(self.domains or ()) if domain == name]
        if not chosen:
            known = ", ".join(sorted(set(self.domains or ()))) or "none"
            raise TraceError(f"`{name}` is no domain of the trace; it has {known}")
        return self.select(chosen)

    def to_bytes(self) -> bytes:
        """Return the `.safetensors` file as bytes; equal traces give equal bytes."""
        tensors: dict[str, NDArray[Any]] = {"ranks": self.ranks, "documents": self.documents}
        if self.topk_probs is not None and self.entropies is not None:
            tensors |= {"topk_probs": self.topk_probs, "entropies": self.entropies}
        if self.prompts is not None:
            tensors["prompts"] = self.prompts
        metadata = {**self.metadata, "schema": SCHEMA}
        if self.domains is not None:
            metadata["domains"] = json.dumps(self.domains, separators=(",", ":"))
        return _sorted_header(save(tensors, metadata=metadata))

    def write(self, path: str | Path) -> None:
        """Write a `.safetensors` file; an interruption leaves the old one whole."""
        with replacing(Path(path)) as temporary:
            temporary.write_bytes(self.to_bytes())

    @classmethod
    def read(cls, path: str | Path) -> RankTrace:
        """Read a trace.

        Raises
        ------
        TraceError
            If the file is no trace or is damaged.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"`{path}` cannot be read: {error.strerror}; make one with treeopt calibrate") from error
        try:
            tensors = load(data)
            metadata = _metadata(data)
        except (SafetensorError, ValueError, KeyError, struct.error) as error:
            raise TraceError(f"`{path}` is no safetensors file or is cut off ({error}); calibrate again") from error
        schema = metadata.pop("schema", None)
        if schema != SCHEMA:
            raise TraceError(f"`{path}` has schema {schema!r}, not {SCHEMA!r}; make a trace with treeopt calibrate")
        missing = sorted({"ranks", "documents"} - set(tensors))
        if missing:
            raise TraceError(f"`{path}` lacks the tensor {missing[0]!r}; calibrate again")
        domains = metadata.pop("domains", None)
        try:
            return cls(
                tensors["ranks"], tensors["documents"], _domains(domains), metadata,
                tensors.get("topk_probs"), tensors.get("entropies"), tensors.get("prompts"),
            )  # fmt: skip
        except TraceError as error:
            raise TraceError(f"`{path}`: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankTrace) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]


def _domains(text: str | None) -> list[str] | None:
    if text is None:
        return None
    try:
        domains = strictjson.parse(text)
    except ValueError as error:
        raise TraceError(f"its `domains` are {error}; calibrate again") from error
    if not isinstance(domains, list) or not all(isinstance(domain, str) for domain in domains):
        raise TraceError("its `domains` must be a list of texts; calibrate again")
    return domains


def _metadata(data: bytes) -> dict[str, str]:
    (length,) = struct.unpack("<Q", data[:8])
    metadata: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return metadata


def _sorted_header(data: bytes) -> bytes:
    """Write the header again with sorted keys: the library keeps metadata in a hash map, in an order of its own."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]
