"""What is learnt of a document: the assistant's turns, each token for the target and for every head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.calibrate.documents import Continuation
from treeopt.errors import PromptError
from treeopt.prompts import Prompt
from treeopt.targets.loading import LoadedTarget

__all__ = ["Sample", "conversations", "held_out", "labels_of", "samples_hash", "whole"]

HELD_OUT_EVERY = 32  # one document in so many measures and is not learnt


@dataclass(frozen=True, slots=True)
class Sample:
    """A document, and which of its tokens are learnt.

    Attributes
    ----------
    document : Continuation
        Its tokens begin with the first that is learnt.
    learnt : tuple of bool
        One a token; False in a user's turn and in what frames it.
    """

    document: Continuation
    learnt: tuple[bool, ...]


def whole(document: Continuation) -> Sample:
    """Return a sample of which every token behind the prompt is learnt."""
    return Sample(document, (True,) * len(document.tokens))


def conversations(target: LoadedTarget, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[Sample]:
    """Return the conversations of a data set: every turn of the assistant's is learnt, cut to `max_new_tokens` each.

    An earlier turn is learnt where the chat template repeats it as it was, which templates that strip reasoning do not.

    Raises
    ------
    PromptError
        If a prompt has no reply, or one of the two no tokens.
    """
    return [_conversation(target, prompt, max_new_tokens) for prompt in prompts]


def _conversation(target: LoadedTarget, prompt: Prompt, most: int) -> Sample:
    if prompt.reply is None:
        raise PromptError(
            f"prompt `{prompt.id}` has no reply to learn; give an assistant turn or use --continuations generated"
        )
    messages = prompt.messages
    before = target.prompt_ids(messages)
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:  # a target is never asked to speak before it has read something
            opening, reply = target.prompt_ids(messages[:i]), target.reply_ids(message["content"])
            start, end = len(opening), len(opening) + len(reply)
            if before[:start] == opening and before[start:end] == reply:
                spans.append((start, min(end, start + most)))
    ids = [*before, *target.reply_ids(prompt.reply)[:most]]
    spans.append((len(before), len(ids)))
    first = spans[0][0]
    if not first or len(ids) == len(before):
        raise PromptError(f"prompt `{prompt.id}` or its reply has no tokens; leave it out")
    learnt = [False] * (len(ids) - first)
    for start, end in spans:
        learnt[start - first : end - first] = [True] * (end - start)
    document = Continuation(prompt.id, prompt.domain, tuple(ids[:first]), tuple(ids[first:]))
    return Sample(document, tuple(learnt))


def held_out(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Split into what is learnt and what measures."""
    return [s for i, s in enumerate(samples) if i % HELD_OUT_EVERY], list(samples[::HELD_OUT_EVERY])


def labels_of(sample: Sample, num_heads: int, vocabulary: int | None = None) -> Tensor:
    """Return what the state that token i came from should lead to, for every token i.

    Parameters
    ----------
    sample : Sample
    num_heads : int
    vocabulary : int, optional
        Tokens that the heads can guess, from token 0 on; all by default.

    Returns
    -------
    Tensor of int64, shape (tokens, 1 + num_heads)
        Column 0: token i, the target's own. Column 1 + h: token i + 1 + h, head h's. -1 where the document ends before, or
        a token on the way is not learnt: no head guesses over a turn of the user's. A head's is -1 too where it has no
        column for the token.
    """
    if not sample.document.tokens:
        return torch.empty((0, 1 + num_heads), dtype=torch.int64)
    tokens = torch.tensor(sample.document.tokens, dtype=torch.int64)
    padding = tokens.new_full((num_heads,), -1)
    given = torch.where(torch.tensor(sample.learnt, dtype=torch.bool), tokens, -1)
    rows = torch.cat([given, padding]).unfold(0, num_heads + 1, 1)
    labels = torch.where((rows >= 0).cumprod(1).bool(), rows, -1)
    if vocabulary is not None:
        labels[:, 1:][labels[:, 1:] >= vocabulary] = -1
    return labels


def samples_hash(samples: Sequence[Sample]) -> str:
    """Return the sha256 over token ids and what of them is learnt."""
    digest = hashlib.sha256()
    for sample in samples:
        document = sample.document
        digest.update(repr((document.prompt_id, document.prompt, document.tokens, sample.learnt)).encode())
    return digest.hexdigest()
