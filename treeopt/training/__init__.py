"""Training of Medusa heads: alone on a frozen target, or together with it."""

from treeopt.training.reporting import require_reporter
from treeopt.training.run import Trained, train
from treeopt.training.samples import Sample, conversations, whole
from treeopt.training.settings import JointSettings, TrainingSettings

__all__ = [
    "JointSettings",
    "Sample",
    "Trained",
    "TrainingSettings",
    "conversations",
    "require_reporter",
    "train",
    "whole",
]
