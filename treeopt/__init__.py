"""Build, prove and run draft trees for speculative decoding with several heads."""

from treeopt.acceptance import AcceptanceTable
from treeopt.buffers import TreeBuffers
from treeopt.document import read_tree, write_tree
from treeopt.errors import TreeoptError
from treeopt.optimize import BuiltTree, best_tree
from treeopt.replays import replay
from treeopt.trace import RankTrace
from treeopt.tree import DraftTree, chain, dense_tree
from treeopt.version import __version__

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
    "dense_tree",
    "read_tree",
    "replay",
    "write_tree",
]
