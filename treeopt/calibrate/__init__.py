"""Calibration: the target's own text, then the rank every head gives each token of it."""
