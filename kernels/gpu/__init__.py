"""Triton kernels: ``X_triton`` computes what ``kernels.X`` defines."""
