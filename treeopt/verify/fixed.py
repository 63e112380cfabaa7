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
    hidden : Tensor, shape (rows, hidden)
        Gives the shape and dtype of the states.
    capture : bool
        Whether to capture the step as a CUDA graph; otherwise it is run as it is.
    """

    def __init__(self, step: Step, cache: RowCache, hidden: Tensor, *, capture: bool) -> None:
        self.cache, self._step = cache, step
        num_rows, device = len(cache.lengths), hidden.device
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.state = State(zeros, torch.zeros_like(zeros), torch.zeros_like(hidden))
        self._going = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture:
            self._table = self._capture()

    def begin(self, state: State) -> None:
        """Put the rows where `state` says; all of them go on."""
        self._set(state)
        self._going.fill_(True)

    def end(self, row: int) -> None:
        """Let a row stand still: it is computed still, but no longer moves on."""
        self._going[row] = False

    def __call__(self) -> Tensor:
        """Take a step; return its table, see `StepOutcome`. It is overwritten by the next."""
        if self._graph is None:
            return self._advance()
        self._graph.replay()
        return self._table

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

    def _capture(self) -> Tensor:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._run()  # writes behind the prefix only, and moves nothing on
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            table = self._advance()
        return table
