"""Search for the tree with the largest E[L] at a budget."""

from treeopt.optimize.best_first import best_tree, certified
from treeopt.optimize.built import BuiltTree
from treeopt.optimize.certificate import Noise
from treeopt.optimize.models import HeadModel, JointModel, PathModel, SiblingModel

__all__ = ["BuiltTree", "HeadModel", "JointModel", "Noise", "PathModel", "SiblingModel", "best_tree", "certified"]
