"""Measured inputs of treeopt: prompts, recipes, traces, tables and the demo heads."""
