"""What an engine is: a decoder that reads a tree in a form of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from treeopt.engines._rules import Rule
from treeopt.errors import EngineError
from treeopt.tree import DraftTree

__all__ = ["Engine", "Setting", "Settings", "Versions", "no_notes", "no_rules"]

Value = int | str
Settings = Mapping[str, Value]  # holds only what was given or has a default


@dataclass(frozen=True)
class Setting:
    """Something that the form needs and the tree does not say.

    Attributes
    ----------
    name : str
    help : str
    least : int, optional
        The setting is a whole number from here on.
    choices : tuple of str
        The setting is one of these. Without `least` and `choices` it is any text.
    default : int or str, optional
    required : bool
        For writing.
    limit : str
        What a tree must obey because of it, in a few words.
    """

    name: str
    help: str
    least: int | None = None
    choices: tuple[str, ...] = ()
    default: Value | None = None
    required: bool = False
    limit: str = ""

    def parse(self, text: str) -> Value:
        """Read a value.

        Raises
        ------
        EngineError
            For a value that is none.
        """
        if self.choices and text not in self.choices:
            raise EngineError(f"`{self.name}` is {text!r}; give one of {', '.join(self.choices)}")
        if self.least is None:
            return text
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < self.least:
            raise EngineError(f"`{self.name}` is {text!r}; give a whole number from {self.least} on")
        return int(text)


@dataclass(frozen=True)
class Versions:
    """Which versions of an engine read its form.

    Attributes
    ----------
    text : str
    first, last : tuple of int
        The first and the last of them, as far as numbered: (0, 20) takes in 0.20.1. Empty where there is none.
    """

    text: str = "all"
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    def check(self, engine: str, given: str) -> None:
        """Check that a version reads the form.

        Raises
        ------
        EngineError
            For a version outside, and for text that is no version.
        """
        match = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", given)
        if match is None:
            raise EngineError(f"`{given}` is no version of {engine}; write it as 1.2.0")
        number = tuple(map(int, match[1].split(".")))
        padded = number + (0,) * (len(self.first) - len(number))
        if padded < self.first or number[: len(self.last)] > self.last > ():
            raise EngineError(
                f"`{engine}` {given} reads no such file; versions: {self.text}. Name one of those, or another engine"
            )


def no_rules(settings: Settings) -> Sequence[Rule]:
    """Return nothing: the engine takes every tree."""
    return ()


def no_notes(tree: DraftTree, settings: Settings) -> Sequence[str]:
    """Return nothing."""
    return ()


@dataclass(frozen=True)
class Engine:
    """A decoder that reads a tree.

    Attributes
    ----------
    name : str
        As the command line takes it.
    reader : str
        What reads the file.
    form : str
        What the file is.
    holds : {'tree', 'structure', 'shape', 'number'}
        What the file determines: the tree; parents but no ranks; only parameters of trees the engine grows itself; only
        a number.
    counts_root : bool or None
        Whether the root is one of the nodes in the file; None where the file counts none.
    write : callable
        From a tree that obeys the rules, and settings, to the text of the file.
    read : callable, optional
        From the text of a file to its tree. None for forms that do not determine one.
    rules : callable
        From settings to what a tree must obey, in the order in which it is mended.
    settings : tuple of Setting
    versions : Versions
    notes : callable
        What a user must do beside the file.
    summarises : bool
        Whether the file never holds more than a part of the tree: it is cut to that part without being asked.
    """

    name: str
    reader: str
    form: str
    holds: str
    counts_root: bool | None
    write: Callable[[DraftTree, Settings], str]
    read: Callable[[str], DraftTree] | None = None
    rules: Callable[[Settings], Sequence[Rule]] = no_rules
    settings: tuple[Setting, ...] = ()
    versions: Versions = field(default_factory=Versions)
    notes: Callable[[DraftTree, Settings], Sequence[str]] = no_notes
    summarises: bool = False

    def __post_init__(self) -> None:
        assert self.holds in ("tree", "structure", "shape", "number"), self.holds
        assert self.read is None or self.holds != "shape", "a shape determines no tree"

    def settings_of(self, given: Mapping[str, str], *, writing: bool = True) -> Settings:
        """Return settings with defaults filled in.

        Parameters
        ----------
        given : mapping of str to str
            Values as text.
        writing : bool
            Whether required settings must be there.

        Raises
        ------
        EngineError
            For an unknown setting, a value that is none, or a required one that is missing.
        """
        known = {setting.name: setting for setting in self.settings}
        for name in given:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise EngineError(f"`{name}` is no setting of {self.name}; {has}")
        values: dict[str, Value] = {}
        for setting in self.settings:
            if setting.name in given:
                values[setting.name] = setting.parse(given[setting.name])
            elif setting.default is not None:
                values[setting.name] = setting.default
            elif setting.required and writing:
                raise EngineError(
                    f"`{self.name}` needs {setting.name}: {setting.help}; give --set {setting.name}=VALUE"
                )
        return values
