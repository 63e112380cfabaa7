"""The processes of one calibration: who does what, who waits for whom, and how all end when one fails.

Units of work are formed before they are shared out, each process takes the next one that nobody has taken, and results go
through the files of `DocumentStore`: beside a few numbers nothing travels between processes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # its stubs leave them out

from treeopt.errors import OtherProcessError, TraceError, first_line
from treeopt.progress import Progress

__all__ = ["DEFAULT_TIMEOUT", "Processes", "SharedProgress", "joined"]

DEFAULT_TIMEOUT = 1800.0  # seconds
POLL_SECONDS = 0.05
NOTICE_SECONDS = 10.0  # how long a failed first process keeps the store up, so that the others learn why they end


class Processes:
    """One process alone; the base of several.

    Attributes
    ----------
    rank, size : int
        Number of this process, from 0, and how many there are.
    device : str
        Where this process computes.
    """

    def __init__(self, device: str = "auto") -> None:
        self.rank, self.size, self.device = 0, 1, device
        self._counts: Counter[str] = Counter()

    def share(self, label: str, num_units: int) -> Iterator[int]:
        """Yield the units that this process is to do; each of 0 … num_units - 1 goes to one process."""
        yield from range(num_units)

    def meet(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every process has come to this point; call `meanwhile` now and then."""
        self._counts.clear()

    def count(self, label: str, amount: int) -> int:
        """Add to a number that all processes share until they meet, and return it."""
        self._counts[label] += amount
        return self._counts[label]

    def least(self, value: int) -> int:
        """Return the smallest of the values that the processes give."""
        return value


class SharedProgress:
    """One bar for what all processes finish, drawn by the first.

    Parameters
    ----------
    processes : Processes
    label : str
    total, done : int
        Documents in all, and how many an earlier run finished.
    """

    def __init__(self, processes: Processes, label: str, *, total: int, done: int) -> None:
        self._processes = processes
        self._bar = Progress(label, total=total, done=done) if processes.rank == 0 else None
        self._documents = self._tokens = 0  # drawn so far

    def __enter__(self) -> SharedProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, value, trace)

    def add(self, *, documents: int, tokens: int) -> None:
        """Count what this process has finished."""
        self._processes.count("documents", documents)
        self._processes.count("tokens", tokens)
        self.refresh()

    def refresh(self) -> None:
        """Draw what all have finished."""
        if self._bar is None:
            return
        documents, tokens = self._processes.count("documents", 0), self._processes.count("tokens", 0)
        self._bar.add(documents=documents - self._documents, tokens=tokens - self._tokens)
        self._documents, self._tokens = documents, tokens


@contextmanager
def joined(device: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> Iterator[Processes]:
    """Join the other processes that torchrun started; without torchrun this one is alone.

    An error in one process ends all: the one that failed raises its own error, the others `OtherProcessError`.

    Parameters
    ----------
    device : str
        ``auto`` and ``cuda`` become this process's own CUDA device where there are several.
    timeout : float
        Seconds to wait for a process while no process finishes anything.

    Raises
    ------
    TraceError
        If the processes do not find each other, or one of them is lost.
    OtherProcessError
        If another process has failed, and has said why.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield Processes(device)
        return
    several = _Several(device, timeout)
    try:
        several.start()
        yield several
        several.leave()
    except BaseException as error:
        if several.is_first_to_fail():
            raise
        raise OtherProcessError(str(error)) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Several(Processes):
    """Processes that share numbers through the key-value store of torch.distributed."""

    def __init__(self, device: str, timeout: float) -> None:
        super().__init__(_own_device(device))
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._has_device = device in ("auto", "cuda") and per_node <= _num_cuda()
        self._timeout, self._meetings = timeout, 0

    def start(self) -> None:
        """Find the other processes and open the group."""
        limit = timedelta(seconds=self._timeout)
        with _contact("the processes of the run did not find each other"):
            base, self.rank, self.size = next(iter(rendezvous("env://", timeout=limit)))
            self._store = PrefixStore("treeopt", base)
        self._add("with a device", int(self._has_device))
        self.meet()
        backend = _backend(self._add("with a device", 0), self.size)
        if backend == "nccl":
            torch.cuda.set_device(self.device)
        group = PrefixStore("group", base)
        with _contact("the processes of the run cannot open a group"):
            dist.init_process_group(backend, store=group, rank=self.rank, world_size=self.size, timeout=limit)

    def share(self, label: str, num_units: int) -> Iterator[int]:
        while (unit := self.count(f"{label} taken", 1) - 1) < num_units:
            yield unit

    def meet(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        arrived = self.count("arrived", 1)
        beat, deadline = -1, 0.0
        while arrived < self.size:
            if (now := self._add("beat", 0)) != beat:
                beat, deadline = now, time.monotonic() + self._timeout
            if time.monotonic() > deadline:
                raise TraceError(
                    f"process {self.rank} waited {self._timeout:.0f} s for {self.size - arrived} of {self.size} "
                    "processes, in which nothing was finished; run the same command again to go on, with a longer "
                    "--timeout if they were only slow"
                )
            time.sleep(POLL_SECONDS)
            meanwhile()
            arrived = self.count("arrived", 0)
        meanwhile()  # what the last one to come has counted
        self._meetings += 1

    def count(self, label: str, amount: int) -> int:
        # What is counted before two meetings is apart: no process is past a meeting before all have come to it.
        return self._add(f"{self._meetings} {label}", amount)

    def least(self, value: int) -> int:
        self.meet()
        given = torch.tensor(value, device="cpu" if dist.get_backend() == "gloo" else self.device)
        with _contact("a process of the run is gone"):
            dist.all_reduce(given, op=dist.ReduceOp.MIN)
            return int(given)

    def is_first_to_fail(self) -> bool:
        """Tell the others that this process fails; return whether it is the one that says why."""
        with suppress(AttributeError, RuntimeError):  # before the store is there, and after it is gone, nobody hears
            if self._store.add("failed", 1) > 1:
                return False
            until = time.monotonic() + min(NOTICE_SECONDS, self._timeout)
            while self.rank == 0 and self._store.add("failed", 0) < self.size and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        return True

    def leave(self) -> None:
        """Wait for all at the end: the first process may hold the store that the others read."""
        if self.rank == 0:
            self.meet()
        else:
            self.count("arrived", 1)

    def _add(self, key: str, amount: int) -> int:
        with _contact("a process of the run is gone"):
            if self._store.add("failed", 0):
                raise OtherProcessError("another process of the run failed and has said why")
            if amount:
                self._store.add("beat", 1)
            return int(self._store.add(key, amount))


@contextmanager
def _contact(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # all that torch.distributed raises
        reason = first_line(error)
        raise TraceError(f"{what} ({reason}); run the same command again to go on") from error


def _own_device(device: str) -> str:
    if device in ("auto", "cuda") and _num_cuda():
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % _num_cuda()}"
    return device


def _num_cuda() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _backend(num_with_a_device: int, size: int) -> str:
    """Return NCCL where every process has a CUDA device of its own, else Gloo: all must decide alike."""
    return "nccl" if num_with_a_device == size else "gloo"
