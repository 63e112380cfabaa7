"""Build, prove and run draft trees for speculative decoding with several heads."""

from typing import TYPE_CHECKING, Any

from treeopt.acceptance import AcceptanceTable
from treeopt.buffers import TreeBuffers
from treeopt.document import read_tree, write_tree
from treeopt.errors import TreeoptError
from treeopt.optimize import BuiltTree, best_tree
from treeopt.replays import replay
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree, chain, dense_tree
from treeopt.version import __version__

if TYPE_CHECKING:
    from treeopt.generate import decode

__all__ = [
    "AcceptanceTable",
    "BuiltTree",
    "DraftTree",
    "RankTrace",
    "TreeBuffers",
    "TreeoptError",
    "__version__",
    "best_tree",
    "chain",
    "decode",
    "dense_tree",
    "read_tree",
    "replay",
    "write_tree",
]


def __getattr__(name: str) -> Any:
    # Decoding needs torch, which nothing else here does.
    if name == "decode":
        from treeopt.generate import decode

        return decode
    raise AttributeError(f"module `treeopt` has no attribute `{name}`")
