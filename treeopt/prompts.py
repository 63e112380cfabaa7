"""Prompt files: JSON lines of chats, ShareGPT, `prompt` lines, plain text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt import strictjson
from treeopt.errors import PromptError

__all__ = ["SPLITS", "Message", "Prompt", "evenly", "prompt_key", "prompts_hash", "read_prompt_files", "read_prompts"]

SPLITS = ("train", "calibration", "evaluation")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
REPLY_KEYS = ("completion", "response")

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and, where the data set has one, the reply that follows it.

    Attributes
    ----------
    id : str
        Unique within its file.
    messages : tuple of Message
        Chat turns with keys role and content; the last is the user's.
    domain : str or None
    split : str or None
        train, calibration or evaluation.
    reply : str or None
        Text of the turn after the last of `messages`.
    """

    id: str
    messages: tuple[Message, ...]
    domain: str | None = None
    split: str | None = None
    reply: str | None = None


def read_prompts(path: str | Path, *, split: str | None = None) -> list[Prompt]:
    """Read a prompt file.

    Parameters
    ----------
    path : str or Path
        `.jsonl`: one object a line, with `messages` or `conversations` or `prompt`. `.json`: a list of such objects
        (ShareGPT). `.txt`: one prompt a line; empty lines are passed over.
    split : {'train', 'calibration', 'evaluation'}, optional
        Keep only this split. Prompts that state no split belong to all.

    Returns
    -------
    list of Prompt

    Raises
    ------
    PromptError
        With the number of the first bad line, a repeated id, or when nothing is left.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise PromptError(f"`{path}` cannot be read: {reason}; give a .jsonl, .json or .txt file of prompts") from error
    prompts = [_prompt(row, where, f"{i:06}") for i, (where, row) in enumerate(_rows(path, text), 1)]
    _refuse_repeated(prompts, str(path))
    kept = [prompt for prompt in prompts if split is None or prompt.split in (None, split)]
    if not kept:
        what = f"of split {split}" if prompts and split else "at all"
        raise PromptError(f"`{path}` has no prompts {what}; add some or choose another --split")
    return kept


def read_prompt_files(paths: Sequence[Path], *, split: str | None = None, limit: int | None = None) -> list[Prompt]:
    """Read several prompt files as one; see `read_prompts`.

    Parameters
    ----------
    paths : sequence of Path
    split : {'train', 'calibration', 'evaluation'}, optional
    limit : int, optional
        Most prompts of each file, taken evenly.

    Raises
    ------
    PromptError
        As `read_prompts`, and when two files share an id.
    """
    files = [read_prompts(path, split=split) for path in paths]
    prompts = [prompt for found in files for prompt in (found if limit is None else evenly(found, limit))]
    _refuse_repeated(prompts, ", ".join(map(str, paths)))
    return prompts


def evenly(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts spread evenly over all, or all if there are fewer."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 over ids, messages and replies: equal hashes mean equal prompts in equal order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.messages, prompt.reply]).encode() + b"\n")
    return digest.hexdigest()


def prompt_key(prompt: Prompt, *, with_reply: bool) -> int:
    """Return 64 bits of the sha256 over what a document follows from: the messages, and the reply where it is given.

    Parameters
    ----------
    prompt : Prompt
        Its id does not count: files number their prompts alike.
    with_reply : bool
        Whether the document is the prompt's own reply rather than what the target generates.

    Returns
    -------
    int
        Signed.
    """
    content = json.dumps([prompt.messages, prompt.reply if with_reply else None]).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".txt":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"`{path}` line {number}", {"prompt": line.strip()}
    elif path.suffix == ".json":
        rows = _parse(text, f"`{path}`")
        if not isinstance(rows, list):
            raise PromptError(f"`{path}` is {type(rows).__name__}, not a list of conversations; see ShareGPT's form")
        for number, row in enumerate(rows, 1):
            yield f"`{path}` item {number}", row
    else:
        # Not str.splitlines: JSON strings may hold U+2028 and its kin unescaped.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"`{path}` line {number}", _parse(line, f"`{path}` line {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return strictjson.parse(text)
    except ValueError as error:
        raise PromptError(f"{where} is {error}; mend or delete it") from error


def _prompt(row: Any, where: str, default_id: str) -> Prompt:
    if not isinstance(row, dict):
        raise PromptError(f"{where} is {type(row).__name__}, not an object; give `messages` or `prompt`")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError(f"{where} holds half of a surrogate pair, which is no text; mend or delete it") from None
    for key in ("domain", "split", "id"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise PromptError(f"{where}: `{key}` is {row[key]!r}, not text; quote it")
    if row.get("split") not in (None, *SPLITS):
        raise PromptError(f"{where}: `split` is {row['split']!r}; use one of {', '.join(SPLITS)}")
    messages = _messages(row, where)
    reply = next((row[key] for key in REPLY_KEYS if isinstance(row.get(key), str)), None)
    if messages[-1]["role"] == "assistant":
        messages, reply = messages[:-1], messages[-1]["content"]
    if not messages or messages[-1]["role"] != "user":
        raise PromptError(f"{where} has no user turn before the reply; a prompt ends with the user's words")
    return Prompt(
        id=row.get("id") or default_id,
        messages=tuple(messages),
        domain=row.get("domain"),
        split=row.get("split"),
        reply=reply,
    )


def _messages(row: dict[str, Any], where: str) -> Sequence[Message]:
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return [{"role": "user", "content": row["prompt"]}]
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"{where} has neither `messages` nor `conversations` nor a non-empty `prompt`; give one")
    return [_message(turn, f"{where}, turn {i}") for i, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise PromptError(f"{where} is {type(turn).__name__}, not an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"{where} has role {role!r}; use system, user or assistant")
    if not isinstance(content, str) or not content.strip():
        raise PromptError(f"{where} has no text; delete it or give `content`")
    return {"role": ROLES[role], "content": content}


def _refuse_repeated(prompts: Sequence[Prompt], where: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(f"`{where}` has id {prompt.id!r} twice; ids must be unique")
        seen.add(prompt.id)
