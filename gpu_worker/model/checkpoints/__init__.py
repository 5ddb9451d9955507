"""Quantised and foreign checkpoints: how a model is built around them, and written as one."""
