"""Quantised checkpoints: one file a format, which unpacks its tensors into the internal form."""
