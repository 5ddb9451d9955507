"""The model: everything that touches tensors."""
