"""Attention over a cached prefix and a tree of new tokens, behind one small interface."""

from treeopt.attention.passes import Pass

__all__ = ["Pass"]
