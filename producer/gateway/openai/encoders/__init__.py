"""Embeddings, rankings and classes over HTTP."""
