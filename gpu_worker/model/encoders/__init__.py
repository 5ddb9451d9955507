"""Encoders: embeddings, relevance and classes of texts, each answered at once."""
