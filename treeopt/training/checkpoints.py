"""Which checkpoints of a stage were written to their end, and may be gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import TrainingArguments

from treeopt.errors import HeadsError

__all__ = ["COMPLETE", "damaged", "forget", "last_complete", "note_complete"]

COMPLETE = "complete"  # stands in a checkpoint that was written to its end


def damaged(checkpoint: str | Path, reason: str) -> HeadsError:
    """Return the error of a checkpoint that cannot be gone on from."""
    return HeadsError(f"`{checkpoint}` is damaged ({reason}); delete it to go on from the one before")


def note_complete(checkpoint: Path) -> None:
    """Note that a checkpoint was written to its end."""
    (checkpoint / COMPLETE).touch()


def forget(folder: Path) -> None:
    """Delete a stage's checkpoints; what is left of them after a break is none to go on from."""
    for mark in folder.glob(f"checkpoint-*/{COMPLETE}"):
        mark.unlink()
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def last_complete(folder: Path, arguments: TrainingArguments) -> str | None:
    """Return the newest checkpoint that was written to its end; delete what was not.

    Raises
    ------
    HeadsError
        If a file of it is missing that Trainer would go on without, from fresh values.
    """
    found = []
    for checkpoint in folder.glob("checkpoint-*"):
        if (checkpoint / COMPLETE).exists():
            found.append(checkpoint)
        elif arguments.process_index == 0:
            shutil.rmtree(checkpoint, ignore_errors=True)
    if not found:
        return None
    newest = max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))
    own = f"rng_state_{arguments.process_index}.pth" if arguments.world_size > 1 else "rng_state.pth"
    for name in ("optimizer.pt", "scheduler.pt", own):
        if not (newest / name).is_file():
            raise damaged(newest, f"{name} is missing")
    return str(newest)
