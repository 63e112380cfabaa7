"""Search for the tree with the largest E[L] at a budget."""

from treeopt.optimize.best_first import best_tree
from treeopt.optimize.built import BuiltTree

__all__ = ["BuiltTree", "best_tree"]
