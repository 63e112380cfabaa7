"""Documents, prompts with their continuations, that are read one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from treeopt.prompts import Prompt

__all__ = ["Continuation", "Documents", "documents_hash"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and what follows it, as token ids.

    Attributes
    ----------
    prompt_id : str
    domain : str or None
    prompt : tuple of int
        Chat template included.
    tokens : tuple of int
        The continuation, up to and including the end-of-sequence token if it was reached.
    """

    prompt_id: str
    domain: str | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        """Tokens that a pass over the document reads: the last one is guessed only."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)


class Documents(Sequence[Continuation]):
    """Documents whose tokens are made or read anew whenever one is asked for; none stays in memory.

    Parameters
    ----------
    prompts : sequence of Prompt
    prompt_ids : callable
        Gives the token ids of a prompt.
    tokens : callable
        Gives the tokens that follow a prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Callable[[Prompt], Sequence[int]],
        tokens: Callable[[Prompt], Sequence[int]],
    ) -> None:
        self.prompts, self._prompt_ids, self._tokens = prompts, prompt_ids, tokens

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Continuation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Continuation]: ...

    def __getitem__(self, index: int | slice) -> Continuation | list[Continuation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        prompt = self.prompts[index]
        return Continuation(prompt.id, prompt.domain, tuple(self._prompt_ids(prompt)), tuple(self._tokens(prompt)))

    def survey(self) -> tuple[list[int], str]:
        """Return how many tokens a pass over each document reads, and `documents_hash`, in one reading."""
        sizes: list[int] = []

        def noted() -> Iterator[Continuation]:
            for document in self:
                sizes.append(document.num_inputs)
                yield document

        return sizes, documents_hash(noted())


def documents_hash(documents: Iterable[Continuation]) -> str:
    """Return the sha256 over the token ids of documents, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(repr((document.prompt_id, document.prompt, document.tokens)).encode())
    return digest.hexdigest()
