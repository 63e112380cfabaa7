"""Documents finished in groups, by any number of processes, going on from what is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from treeopt.calibrate.processes import Processes, SharedProgress
from treeopt.calibrate.store import DocumentStore
from treeopt.errors import TraceError

__all__ = ["Finished", "finish"]

Finished = Iterable[tuple[int, list[Any], int]]  # number of a document, what to keep of it, its tokens


def finish(
    store: Path,
    header: dict[str, Any],
    documents: Sequence[str],
    groups: Sequence[Sequence[int]],
    work: Callable[[Sequence[int]], Finished],
    processes: Processes,
    label: str,
) -> DocumentStore:
    """Have a value of every document in a store.

    The last bits of a product depend on how many rows it has. So a group is worked on whole or not at all: where an
    earlier run has finished part of it, all of it is done again and the rest kept. Then a document's value depends
    neither on the number of processes nor on interruptions.

    Parameters
    ----------
    store : Path
    header : dict
        Says how values are made.
    documents : sequence of str
        Ids.
    groups : sequence of sequences of int
        Numbers of documents that are worked on together.
    work : callable
        Yields what is finished of a group, each document as soon as it is.
    processes : Processes
        All call this with the same arguments.
    label : str
        For the progress bar.

    Returns
    -------
    DocumentStore
        Closed for writing.

    Raises
    ------
    TraceError
        If the store is of another header, damaged, in use, or not one that all processes see.
    """
    with DocumentStore(store, header, processes.rank) as kept:
        processes.meet()  # all files are there, and nobody writes
        kept.look()
        waiting = [group for group in groups if not all(documents[i] in kept for i in group)]
        processes.meet()  # all have seen the same
        done = sum(document in kept for document in documents)
        with SharedProgress(processes, label, total=len(documents), done=done) as progress:
            for number in processes.share(label, len(waiting)):
                for index, value, tokens in work(waiting[number]):
                    if documents[index] not in kept:
                        kept.append(documents[index], value)
                        progress.add(documents=1, tokens=tokens)
            processes.meet(progress.refresh)
        kept.look()
        processes.meet()  # all have read everything, and the files may go
    missing = [document for document in documents if document not in kept]
    if missing:
        raise TraceError(
            f"`{store.parent}` lacks {len(missing)} documents that other processes finished, {missing[0]!r} the first; "
            "choose a -o in a folder that all processes share"
        )
    return kept
