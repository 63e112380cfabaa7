"""Medusa heads (Cai et al. 2024, arXiv 2401.10774, section 2.1.1).

Head h computes W2 · (x + SiLU(W1 · x + b1)) from the target's last hidden state x, W1 starting at zero and W2 at the
target's own output embedding: an untrained head repeats the target's guess for the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from treeopt.errors import HeadsError
from treeopt.heads.checkpoint import read_checkpoint, write_checkpoint
from treeopt.heads.ranking import top_ranked
from treeopt.products import project

__all__ = ["MedusaHeads"]


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W and b starting at zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the shape of `hidden`."""
        return hidden + functional.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Heads that guess the second, third, … token after the position whose hidden state they read.

    Parameters
    ----------
    lm_head : nn.Module
        The target's output embedding. It is shared, not owned: neither saved nor trained with the heads.
    hidden_size : int
    num_heads : int
    num_layers : int
        Residual blocks a head.
    own_lm_heads : bool
        Whether each head has an output embedding of its own instead.
    """

    def __init__(
        self,
        lm_head: nn.Module,
        hidden_size: int,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        own_lm_heads: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_layers < 1:
            raise HeadsError(f"`num_heads` is {num_heads} and `num_layers` {num_layers}; give at least 1 of each")
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.num_heads, self.num_layers, self.hidden_size = num_heads, num_layers, hidden_size
        self._shared = (lm_head,)  # in a tuple, so that it does not become a submodule
        self.lm_heads: nn.ModuleList | None = None
        if own_lm_heads:
            weight = self.embedding(0)
            self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, weight.shape[0], bias=False) for _ in range(num_heads))
            for own in self.lm_heads:
                own.weight.data.copy_(weight.data)  # type: ignore[operator]

    @classmethod
    def for_target(cls, target: nn.Module, num_heads: int = 5, num_layers: int = 1) -> MedusaHeads:
        """Return untrained heads for a target, on its device and in its dtype.

        Parameters
        ----------
        target : PreTrainedModel
        num_heads : int
        num_layers : int
        """
        lm_head = _lm_head(target)
        weight: Tensor = lm_head.weight  # type: ignore[assignment]
        return cls(lm_head, weight.shape[1], num_heads, num_layers).to(weight.device, weight.dtype).eval()

    @classmethod
    def load(cls, path: str | Path, target: nn.Module) -> MedusaHeads:
        """Load a checkpoint for a target, onto its device and in its dtype.

        Parameters
        ----------
        path : str or Path
            A checkpoint file, the directory that holds it, or a hub id. Heads and layers are counted from its tensors.
        target : PreTrainedModel

        Raises
        ------
        HeadsError
            Naming a missing, extra or mis-shaped tensor.
        """
        found = read_checkpoint(path)
        lm_head = _lm_head(target)
        weight: Tensor = lm_head.weight  # type: ignore[assignment]
        heads = cls(lm_head, weight.shape[1], found.num_heads, found.num_layers, own_lm_heads=found.own_lm_heads)
        expected = heads.state_dict()
        for name, tensor in found.tensors.items():
            if tensor.shape != expected[name].shape:
                raise HeadsError(
                    f"`{path}`: `{found.names[name]}` has shape {tuple(tensor.shape)}, the target needs "
                    f"{tuple(expected[name].shape)}; these heads belong to another target"
                )
        heads.load_state_dict(found.tensors, strict=True)
        return heads.to(weight.device, weight.dtype).eval()

    def save(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write `medusa_lm_head.safetensors` and `config.json` into a directory, made if need be.

        Parameters
        ----------
        directory : str or Path
        dtype : torch.dtype, optional
            The tensors' own by default.
        """
        tensors = {name: value.detach().to("cpu", dtype or value.dtype) for name, value in self.state_dict().items()}
        write_checkpoint(Path(directory), tensors, self.num_heads, self.num_layers)

    @property
    def vocabulary(self) -> int:
        """Number of logits of each head."""
        return int(self.embedding(0).shape[0])

    def embedding(self, head: int) -> Tensor:
        """Return the weight of a head's output embedding, (vocabulary, hidden)."""
        weight = (self._shared[0] if self.lm_heads is None else self.lm_heads[head]).weight
        assert isinstance(weight, Tensor)
        return weight

    def states(self, hidden: Tensor) -> Tensor:
        """Return what each head's output embedding reads, shape (heads, *hidden.shape)."""
        return torch.stack([block(hidden) for block in self.blocks])

    def project(self, states: Tensor, head: int) -> Tensor:
        """Return a head's logits, (..., vocabulary), from its entry of `states`."""
        lm_head = self._shared[0] if self.lm_heads is None else self.lm_heads[head]
        return project(lm_head, states)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of all heads, (heads, ..., vocabulary); for few positions only."""
        states = self.states(hidden)
        if self.lm_heads is None:
            return self.project(states, 0)
        return torch.stack([self.project(states[head], head) for head in range(self.num_heads)])

    def draft(self, hidden: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return the best guesses of the first heads.

        Parameters
        ----------
        hidden : Tensor, shape (batch, hidden)
        ranks : sequence of int
            For each depth, how many ranks the tree uses.

        Returns
        -------
        list of Tensor of int64, each (batch, ranks[depth])
        """
        if not ranks:
            return []
        used = [block(hidden) for block in self.blocks[: len(ranks)]]
        if self.lm_heads is None:
            best = top_ranked(self.project(torch.stack(used), 0), max(ranks))
            return [best[head, :, :count] for head, count in enumerate(ranks)]
        return [top_ranked(self.project(state, head), ranks[head]) for head, state in enumerate(used)]


def _lm_head(target: nn.Module) -> nn.Module:
    lm_head = getattr(target, "get_output_embeddings", lambda: None)()
    if lm_head is None:
        raise HeadsError(f"`{type(target).__name__}` has no output embedding; give a causal language model")
    found: nn.Module = lm_head
    return found
