"""Other decoders: what each reads, what it asks of a tree, how its file is written and read.

The folder listing is the registry: every module here whose name does not begin with an underscore has a tuple `ENGINES`.
A new decoder is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from treeopt.engines._build import best_for, constrained
from treeopt.engines._engine import Engine, Setting, Settings, Versions
from treeopt.engines._fit import Fitted, broken, fit
from treeopt.errors import EngineError, TreeError
from treeopt.files import replacing
from treeopt.tree import DraftTree

__all__ = [
    "Engine",
    "Fitted",
    "Setting",
    "Settings",
    "Versions",
    "best_for",
    "broken",
    "constrained",
    "engine_named",
    "engines",
    "fit",
    "read_engine_file",
    "write_engine_file",
]

MAX_BYTES = 64 << 20


@cache
def engines() -> Mapping[str, Engine]:
    """Return every engine by name, sorted."""
    found: dict[str, Engine] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue
        for engine in importlib.import_module(f"{__name__}.{module.name}").ENGINES:
            assert engine.name not in found, f"{engine.name} is there twice"
            found[engine.name] = engine
    return dict(sorted(found.items()))


def engine_named(name: str) -> Engine:
    """Return the engine of a name.

    Raises
    ------
    EngineError
        Naming those there are.
    """
    if name not in engines():
        raise EngineError(f"`{name}` is no engine; give one of {', '.join(engines())}")
    return engines()[name]


def write_engine_file(engine: Engine, tree: DraftTree, settings: Settings, path: str | Path) -> None:
    """Write a tree that obeys an engine's rules; an interruption leaves the old file whole.

    Raises
    ------
    EngineError
        If the tree does not obey; see `fit`.
    """
    fit(engine, tree, settings)
    with replacing(Path(path)) as temporary:
        temporary.write_text(engine.write(tree, settings), encoding="utf8")


def read_engine_file(engine: Engine, path: str | Path) -> DraftTree:
    """Read the tree of an engine's file.

    Raises
    ------
    EngineError
        If the form determines no tree, or the file is not of that form or too large.
    TreeError
        If its nodes make no tree.

    Examples
    --------
    >>> engine_named("trtllm").read("[[0, 0, 0, 0]]").num_nodes  # leaves alone are enough there
    5
    """
    if engine.read is None:
        raise EngineError(f"`{engine.name}` files hold {engine.form}, which determines no tree; export to it only")
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise EngineError(f"the file has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        return engine.read(path.read_text(encoding="utf8"))
    except OSError as error:
        raise EngineError(f"`{path}` cannot be read: {error.strerror}; give a file of {engine.reader}") from error
    except UnicodeDecodeError as error:
        raise EngineError(f"`{path}` is not UTF-8 text; give {engine.form}") from error
    except (EngineError, TreeError) as error:
        raise type(error)(f"`{path}`: {error}") from error
