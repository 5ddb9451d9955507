"""Weights in few bits: one internal form, what makes it, and what computes with it."""
