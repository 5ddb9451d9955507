"""Triton kernels: each computes what the module of the same name above it defines."""
