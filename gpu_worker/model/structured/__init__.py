"""Structured output: constraints, and the masks they put on logits."""
