"""A step of fixed shapes in fixed memory, which a CUDA graph can hold: one launch instead of a thousand."""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.targets.cache import RowCache
from treeopt.verify.step import State, Step, StepOutcome

__all__ = ["FixedStep"]

WARM_UPS = 3  # let libraries choose their algorithms and reserve their memory before anything is captured


class FixedStep:
    """A step over a whole cache whose rows stand in buffers that are written in place.

    The prefix lengths are read on the device, so one capture serves every length.

    Parameters
    ----------
    step : Step
        With a rule that draws no random numbers.
    cache : RowCache
        Holds the prefixes that `state` speaks of.
    state : State
        Where the rows stand.
    capture : bool
        Whether to capture the step as a CUDA graph; otherwise it is run as it is.
    """

    def __init__(self, step: Step, cache: RowCache, state: State, *, capture: bool) -> None:
        self.cache, self._step = cache, step
        self.state = State(state.lengths.clone(), state.roots.clone(), state.hidden.clone())
        self._going = torch.ones_like(self.state.lengths, dtype=torch.bool)
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture:
            with self._device():
                self.warm_up()
                self._table = self._capture()
            self.begin(state)

    def begin(self, state: State) -> None:
        """Put the rows where `state` says; all of them go on."""
        self._set(state)
        self._going.fill_(True)
        self.cache.rest()

    def end(self, row: int) -> None:
        """Let a row stand still: it is computed still, at the beginning of its own row, but no longer moves on."""
        self._going[row] = False
        self.state.lengths[row] = 0  # where it stood a tree might reach beyond the cache

    def __call__(self) -> Tensor:
        """Take a step; return its table, see `StepOutcome`. It is overwritten by the next."""
        if self._graph is None:
            return self._advance()
        with self._device():
            self._graph.replay()
        return self._table

    def warm_up(self) -> None:
        """Step as a capture needs it first; what is written lies behind the prefixes, and nothing moves on."""
        for _ in range(WARM_UPS):
            self._run()

    def _run(self) -> StepOutcome:
        return self._step(self.cache, self.state, span=self.cache.capacity)

    def _advance(self) -> Tensor:
        outcome = self._run()
        moved = torch.where(self._going, outcome.state.lengths, self.state.lengths)
        self._set(State(moved, outcome.state.roots, outcome.state.hidden))
        return outcome.table

    def _set(self, state: State) -> None:
        self.state.lengths.copy_(state.lengths)
        self.state.roots.copy_(state.roots)
        self.state.hidden.copy_(state.hidden)

    def _device(self) -> torch.cuda.device:
        """Streams and graphs belong to the current device, which need not be the target's."""
        return torch.cuda.device(self.state.roots.device)

    def _capture(self) -> Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._advance()  # all kernels are loaded before the capture; `begin` puts the state back
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            table = self._advance()
        return table
