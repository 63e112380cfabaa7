"""Training of Medusa heads on a frozen target (Cai et al. 2024, arXiv 2401.10774, section 2.2.1).

The loss is the sum over heads of 0.8^h times the mean cross-entropy of head h, over the tokens of the continuations
alone: prompts are read, never learnt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeopt.calibrate.continuations import Continuation, documents_hash
from treeopt.calibrate.observe import CHUNK_LOGITS, batches, document_states
from treeopt.errors import HeadsError
from treeopt.files import replacing
from treeopt.heads.medusa import MedusaHeads
from treeopt.progress import Progress
from treeopt.targets.forward import Forward
from treeopt.targets.loading import LoadedTarget, fingerprint

__all__ = ["TrainingSettings", "accuracies", "chunked_loss", "train_heads"]

HEAD_DECAY = 0.8
GROUP_TOKENS = 16384  # positions shuffled together
SAVE_SPACING = 20  # times as long as a save took pass before the next
FORWARD_TOKENS = 4096  # padded tokens of one forward of the target
STATE_BYTES = 4 << 30  # hidden states are kept between epochs up to this size, and computed anew beyond
HELD_OUT_EVERY = 32  # one document in so many measures accuracy and is not learnt


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How heads are trained.

    Attributes
    ----------
    num_heads, num_layers : int
    epochs : int
    learning_rate : float
        Peak of a cosine that ends at 0, after a linear warm-up.
    warmup_steps : int
    batch_size : int
        Positions of one optimiser step.
    weight_decay : float
    seed : int
        Of the order of documents and positions.
    """

    num_heads: int = 5
    num_layers: int = 1
    epochs: int = 3
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    batch_size: int = 256
    weight_decay: float = 0.01
    seed: int = 0


def train_heads(
    target: LoadedTarget, documents: Sequence[Continuation], settings: TrainingSettings, state_path: Path
) -> tuple[MedusaHeads, list[float]]:
    """Train heads on documents; go on from `state_path` if an interrupted run left it.

    Parameters
    ----------
    target : LoadedTarget
        Its parameters are not changed.
    documents : sequence of Continuation
    settings : TrainingSettings
    state_path : Path
        Heads, optimiser and place in the data, rewritten as often as a twentieth of the time allows: after every batch
        or two for small heads.

    Returns
    -------
    MedusaHeads
        In float32.
    list of float
        Top-1 accuracy of each head on held-out documents.

    Raises
    ------
    HeadsError
        If there are too few documents, or `state_path` belongs to a run with other settings.
    """
    target.model.requires_grad_(False)
    held_out = list(documents[::HELD_OUT_EVERY])
    learnt = [document for i, document in enumerate(documents) if i % HELD_OUT_EVERY]
    if not learnt:
        raise HeadsError(f"`{len(documents)}` documents are too few to train on; give at least 2 prompts")
    states = _States(target, documents)
    heads = MedusaHeads.for_target(target.model, settings.num_heads, settings.num_layers).float().train()
    header = {**asdict(settings), "target": fingerprint(target.model), "documents": documents_hash(documents)}
    run = _Run(heads, settings, _num_steps(learnt, settings), state_path, header)
    run.restore()
    groups = [group for epoch in range(settings.epochs) for group in _groups(learnt, settings.seed + epoch)]
    with Progress("training", total=len(groups), done=run.groups, unit="groups") as progress:
        for number in range(run.groups, len(groups)):
            run.learn(*_positions(states, groups[number], settings, number))
            tokens = sum(len(document.tokens) for document in groups[number])
            progress.add(documents=1, tokens=tokens, note=f"loss {run.loss:.3f}")
    heads.eval()
    return heads, accuracies(heads, list(zip(states.of(held_out), (document.tokens for document in held_out))))


@torch.no_grad()
def accuracies(heads: MedusaHeads, documents: Sequence[tuple[Tensor, Sequence[int]]]) -> list[float]:
    """Return each head's top-1 accuracy over documents given as (states, tokens)."""
    hits, seen = [0] * heads.num_heads, [0] * heads.num_heads
    for states, given in documents:
        tokens = torch.tensor(given, device=states.device)
        for head in range(heads.num_heads):
            true = tokens[1 + head :]
            if len(true):
                guesses = heads.project(heads.blocks[head](states[: len(true)].float()).to(states.dtype), head).argmax(
                    -1
                )
                hits[head] += int((guesses == true).sum())
                seen[head] += len(true)
    return [hit / max(count, 1) for hit, count in zip(hits, seen)]


def chunked_loss(heads: MedusaHeads, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the training loss and add its gradient to the heads, holding few logits at a time.

    Parameters
    ----------
    heads : MedusaHeads
    hidden : Tensor, shape (positions, hidden)
        The target's last hidden states.
    labels : Tensor of int64, shape (positions, heads)
        Token that each head should guess; -1 where there is none.

    Returns
    -------
    Tensor, shape ()
        Sum over heads of 0.8^h times the mean over that head's own labelled positions, in nats.
    """
    total = torch.zeros((), device=hidden.device)
    for head, block in enumerate(heads.blocks):
        labelled = labels[:, head] >= 0
        true = labels[labelled, head]
        if not len(true):
            continue
        weight = HEAD_DECAY**head / len(true)
        states = block(hidden[labelled].float())
        loss, gradient = _cross_entropy(heads, head, states.detach().to(hidden.dtype), true)
        states.backward(gradient.float() * weight)
        total += loss * weight
    return total


@torch.no_grad()
def _cross_entropy(heads: MedusaHeads, head: int, states: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of one head and its gradient with respect to `states`.

    The output embedding is frozen, so a chunk's gradient is (softmax - one-hot) · W: it is formed where the logits
    stand, which takes a third of the memory traffic of recording and replaying them.
    """
    embedding = heads.embedding(head)
    total = torch.zeros((), device=states.device)
    gradient = torch.empty_like(states)
    rows = max(1, CHUNK_LOGITS // heads.vocabulary)
    for start in range(0, len(true), rows):
        chunk, labels = slice(start, start + rows), true[start : start + rows, None]
        probabilities = heads.project(states[chunk], head).softmax(dim=-1, dtype=torch.float32)
        total -= probabilities.gather(1, labels).clamp_min(torch.finfo(torch.float32).tiny).log().sum()
        probabilities.scatter_add_(1, labels, probabilities.new_full(labels.shape, -1.0))
        gradient[chunk] = probabilities.to(states.dtype) @ embedding
    return total, gradient


class _Run:
    """Heads, optimiser and the place in the data."""

    def __init__(
        self, heads: MedusaHeads, settings: TrainingSettings, num_steps: int, path: Path, header: dict[str, Any]
    ) -> None:
        self.heads, self.settings, self.path, self.header = heads, settings, path, header
        self.optimizer = torch.optim.AdamW(
            heads.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _cosine(settings.warmup_steps, num_steps))
        self.groups = 0
        self.batches = 0  # of the group begun
        self.loss = float("nan")
        self._saved, self._save_seconds = time.monotonic(), 0.0

    def learn(self, hidden: Tensor, labels: Tensor) -> None:
        """Take one optimiser step per batch of a group's positions, going on behind the batches already learnt."""
        size = self.settings.batch_size
        for start in range(self.batches * size, len(hidden), size):
            batch = slice(start, start + size)
            self.optimizer.zero_grad()
            loss = chunked_loss(self.heads, hidden[batch], labels[batch])
            torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.batches += 1
            self.loss = float(loss)
            # As often as may be while writing takes no more than a twentieth of the time.
            if time.monotonic() - self._saved >= SAVE_SPACING * self._save_seconds:
                self.save()
        self.groups, self.batches = self.groups + 1, 0
        self.save()

    def save(self) -> None:
        """Keep everything that going on needs."""
        start = time.monotonic()
        state = {
            "header": self.header,
            "groups": self.groups,
            "batches": self.batches,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        with replacing(self.path) as temporary:
            torch.save(state, temporary)
        self._saved = time.monotonic()
        self._save_seconds = self._saved - start

    def restore(self) -> None:
        """Go on from a saved state, if there is one."""
        path, header = self.path, self.header
        if not path.is_file():
            return
        device = next(self.heads.parameters()).device
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            stated = dict(state["header"])
        except Exception as error:  # unpickling has no common error
            raise HeadsError(f"`{path}` is damaged; delete it to start anew") from error
        if stated != header:
            differing = sorted(key for key in header if stated.get(key) != header[key])
            raise HeadsError(f"`{path}` was left by a run with another {', '.join(differing)}; delete it to start anew")
        self.groups, self.batches = state["groups"], state["batches"]
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


class _States:
    """Hidden states of documents, kept between epochs while they fit."""

    def __init__(self, target: LoadedTarget, documents: Sequence[Continuation]) -> None:
        self.forward = Forward(target.model)
        width = target.model.config.get_text_config().hidden_size * target.model.dtype.itemsize
        fits = sum(len(d.tokens) for d in documents) * width <= STATE_BYTES
        self.kept: dict[str, Tensor] | None = {} if fits else None
        # A state rounds as its company in the batch falls out. These batches are the same wherever a run goes on.
        self._batches = list(batches(documents, FORWARD_TOKENS)) if fits else []
        self._batch_of = {d.prompt_id: i for i, batch in enumerate(self._batches) for d in batch}

    @torch.no_grad()
    def of(self, documents: Sequence[Continuation]) -> list[Tensor]:
        """Return (tokens, hidden) of each document."""
        if self.kept is None:
            found = self._computed(batches(documents, FORWARD_TOKENS))
            return [found[document.prompt_id] for document in documents]
        missing = sorted({self._batch_of[d.prompt_id] for d in documents if d.prompt_id not in self.kept})
        self.kept.update(self._computed(self._batches[i] for i in missing))
        return [self.kept[document.prompt_id] for document in documents]

    def _computed(self, grouped: Iterable[Sequence[Continuation]]) -> dict[str, Tensor]:
        return {
            document.prompt_id: states.clone()
            for batch in grouped
            for document, states in zip(batch, document_states(self.forward, batch))
        }


def _groups(documents: Sequence[Continuation], seed: int) -> Iterator[list[Continuation]]:
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    group: list[Continuation] = []
    for index in order:
        group.append(documents[index])
        if sum(len(document.tokens) for document in group) >= GROUP_TOKENS:
            yield group
            group = []
    if group:
        yield group


def _positions(
    states: _States, group: Sequence[Continuation], settings: TrainingSettings, number: int
) -> tuple[Tensor, Tensor]:
    """Return the group's hidden states and labels, one row a position, shuffled."""
    hidden = torch.cat(states.of(group))
    labels = torch.cat([_labels(document.tokens, settings.num_heads) for document in group]).to(hidden.device)
    labelled = (labels[:, 0] >= 0).nonzero()[:, 0].cpu()
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
    order = labelled[torch.randperm(len(labelled), generator=generator)].to(hidden.device)
    return hidden[order], labels[order]


def _labels(tokens: Sequence[int], num_heads: int) -> Tensor:
    """Row i holds tokens i + 1, i + 2, …: head h, reading the state that token i came from, guesses token i + 1 + h."""
    padded = torch.tensor([*tokens, *[-1] * num_heads])
    return padded.unfold(0, num_heads, 1)[1 : len(tokens) + 1]


def _num_steps(documents: Sequence[Continuation], settings: TrainingSettings) -> int:
    steps = 0
    for epoch in range(settings.epochs):
        for group in _groups(documents, settings.seed + epoch):
            positions = sum(max(0, len(document.tokens) - 1) for document in group)
            steps += math.ceil(positions / settings.batch_size)
    return steps


def _cosine(warmup: int, total: int) -> Any:
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    return factor
