"""Search for the tree with the largest E[L] at a budget."""

from treeopt.optimize.build import best_tree, best_tree_under, certified
from treeopt.optimize.built import BuiltTree, Certificate
from treeopt.optimize.limits import Limits
from treeopt.optimize.mixture import MixtureModel
from treeopt.optimize.models import HeadModel, JointModel, PathModel, SiblingModel
from treeopt.optimize.noise import Noise, Sample
from treeopt.optimize.otherwise import robust_tree, typical_tree
from treeopt.optimize.passing import PassingModel

__all__ = [
    "BuiltTree",
    "Certificate",
    "HeadModel",
    "JointModel",
    "Limits",
    "MixtureModel",
    "Noise",
    "PassingModel",
    "PathModel",
    "Sample",
    "SiblingModel",
    "best_tree",
    "best_tree_under",
    "certified",
    "robust_tree",
    "typical_tree",
]
