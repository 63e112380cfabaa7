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
from treeopt.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from treeopt.heads.output import OutputEmbedding, num_rows
from treeopt.heads.ranking import top_ranked
from treeopt.heads.vocabulary import Columns, in_target_ids, require_equal_vocabularies
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
        """Return a tensor of the shape of `hidden`, on the block's own device: a large target may lie on several."""
        hidden = hidden.to(self.linear.weight.device)
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
    columns : Columns, optional
        The target's token of each logit; by default logit i is token i, for every row of `lm_head`.
    """

    def __init__(
        self,
        lm_head: nn.Module,
        hidden_size: int,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        own_lm_heads: bool = False,
        columns: Columns | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_layers < 1:
            raise HeadsError(f"`num_heads` is {num_heads} and `num_layers` {num_layers}; give at least 1 of each")
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.num_heads, self.num_layers, self.hidden_size = num_heads, num_layers, hidden_size
        self._shared = (lm_head,)  # in a tuple, so that it does not become a submodule
        self.columns = columns or Columns(num_rows(lm_head))
        self.lm_heads: nn.ModuleList | None = None
        if own_lm_heads:
            owned = [nn.Linear(hidden_size, self.vocabulary, bias=False) for _ in range(num_heads)]
            for own in owned:
                if not own.weight.is_meta:
                    own.weight.data.copy_(self.embedding(0).data)
            self.lm_heads = nn.ModuleList(owned)

    @classmethod
    def for_target(
        cls, target: nn.Module, num_heads: int = 5, num_layers: int = 1, *, own_lm_heads: bool = False
    ) -> MedusaHeads:
        """Return untrained heads for a target, on its device and in its dtype.

        Parameters
        ----------
        target : PreTrainedModel
        num_heads : int
        num_layers : int
        own_lm_heads : bool
            Whether each head gets a copy of the target's output embedding to be trained.
        """
        output = OutputEmbedding.of(target)
        heads = cls(
            output.module, output.hidden_size, num_heads, num_layers,
            own_lm_heads=own_lm_heads, columns=Columns(output.num_tokens),
        )  # fmt: skip
        return heads.to(output.device, output.dtype).eval()

    @classmethod
    def load(cls, path: str | Path, target: nn.Module, *, num_tokens: int | None = None) -> MedusaHeads:
        """Load a checkpoint for a target, onto its device and in its dtype.

        Parameters
        ----------
        path : str or Path
            A checkpoint file or index, the directory that holds it, or a hub id. Heads and layers are counted from its
            tensors.
        target : PreTrainedModel
        num_tokens : int, optional
            Tokens that the target's tokenizer knows: no head guesses the rows behind them, which pad the output embedding
            to a round number. The configuration's `vocab_size` by default.

        Raises
        ------
        HeadsError
            Naming a missing, extra or mis-shaped tensor, or the sizes of a head and a target that do not fit.
        """
        found = read_checkpoint(path)
        found.report()
        output = OutputEmbedding.of(target, num_tokens)
        if found.hidden_size != output.hidden_size:
            raise HeadsError(
                f"`{path}`: hidden size {found.hidden_size}, the target's is {output.hidden_size}; these heads belong to "
                "another target"
            )
        columns = _columns(found, output)
        with torch.device("meta"):  # every tensor comes from the file
            heads = cls(
                output.module, found.hidden_size, found.num_heads, found.num_layers,
                own_lm_heads=found.own_lm_heads, columns=columns,
            )  # fmt: skip
        heads.load_state_dict(_placed(found, columns, output), strict=True, assign=True)
        return heads.to(output.device).eval()

    def save(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write `medusa_lm_head.safetensors` and `config.json` into a directory, made if need be.

        Heads with a vocabulary map are written as `model.safetensors`, in the one format that has a place for it.

        Parameters
        ----------
        directory : str or Path
        dtype : torch.dtype, optional
            The tensors' own by default.
        """
        tensors = {name: value.detach().to("cpu", dtype or value.dtype) for name, value in self.state_dict().items()}
        ids = self.columns.ids
        if ids is None:
            write_checkpoint(Path(directory), tensors, self.num_heads, self.num_layers)
            return
        del tensors["columns.ids"]
        write_checkpoint(
            Path(directory), tensors, self.num_heads, self.num_layers,
            vllm=True, ids=ids.detach().cpu(), vocab_size=num_rows(self._shared[0]),
        )  # fmt: skip

    @property
    def vocabulary(self) -> int:
        """Number of logits of each head."""
        return self.columns.num_columns

    def embedding(self, head: int) -> Tensor:
        """Return the weight of a head's output embedding, (vocabulary, hidden)."""
        if self.lm_heads is not None:
            own: Tensor = self.lm_heads[head].weight  # type: ignore[assignment]
            return own
        weight: Tensor = self._shared[0].weight  # type: ignore[assignment]
        if weight.shape != (num_rows(self._shared[0]), self.hidden_size) or not weight.is_floating_point():
            raise HeadsError("`lm_head` of the target is quantised; give a target whose output embedding is not")
        return weight[: self.vocabulary] if self.columns.ids is None else weight[self.columns.ids]

    def output(self, head: int) -> nn.Module:
        """Return a head's output embedding."""
        return self._shared[0] if self.lm_heads is None else self.lm_heads[head]

    def share(self, lm_head: nn.Module) -> None:
        """Read another output embedding of the same size from now on: the target's own may have been wrapped or copied."""
        self._shared = (lm_head,)

    def states(self, hidden: Tensor) -> Tensor:
        """Return what each head's output embedding reads, shape (heads, *hidden.shape)."""
        return torch.stack([block(hidden) for block in self.blocks])

    def project(self, states: Tensor, head: int) -> Tensor:
        """Return a head's logits, (..., vocabulary), from its entry of `states`: `columns` says of which tokens."""
        return project(self.output(head), states)[..., : self.vocabulary]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of all heads, (heads, ..., vocabulary); for few positions only."""
        states = self.states(hidden)
        if self.lm_heads is None:
            return self.project(states, 0)
        return torch.stack([self.project(states[head], head) for head in range(self.num_heads)])

    @in_target_ids
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


def _columns(found: Checkpoint, output: OutputEmbedding) -> Columns:
    """Return the columns of a checkpoint's heads for a target, or refuse a vocabulary that is not the target's."""
    rows, ids = found.vocabulary, found.ids
    if rows is None:
        return Columns(output.num_tokens)
    if ids is None:
        require_equal_vocabularies(found.source, rows, output.rows, output.num_tokens)
        return Columns(min(rows, output.num_tokens))
    if int(ids.max()) >= output.num_tokens:
        raise HeadsError(
            f"`{found.source}` maps a draft token to {int(ids.max())}, the target has {output.num_tokens} tokens; these heads "
            "belong to another target"
        )
    return Columns(len(ids), ids.sort().values)


def _placed(found: Checkpoint, columns: Columns, output: OutputEmbedding) -> dict[str, Tensor]:
    """Return the state of the heads: copies on the target's device, the output embeddings' rows by rising token."""
    order: Tensor | slice = slice(columns.num_columns) if found.ids is None else found.ids.argsort()
    copies: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in found.tensors.items():
        original = found.names.tensors.get(name, name)
        if original not in copies:  # heads may share one output embedding
            kept = value[order] if name.startswith("lm_heads.") else value
            # A copy always: what is mapped from a file would change or vanish with it.
            copies[original] = kept.to(output.device, output.dtype, copy=True)
        state[name] = copies[original]
    return state if columns.ids is None else {**state, "columns.ids": columns.ids.detach()}
