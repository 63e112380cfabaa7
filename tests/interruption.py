"""A training that ends where it is told to."""

import itertools

import pytest

from treeopt.training import trainer


class Stopped(BaseException):
    pass


def save_every_step(monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_SPACING", 0)
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 0)


def stopped_after(monkeypatch, count, run):
    """Let a run end right behind its count-th checkpoint."""
    saved, on_save = itertools.count(1), trainer._Talk.on_save

    def stopping(self, *arguments, **keywords):
        on_save(self, *arguments, **keywords)
        if next(saved) == count:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(trainer._Talk, "on_save", stopping)
        with pytest.raises(Stopped):
            run()
