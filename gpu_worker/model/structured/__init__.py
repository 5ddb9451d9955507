"""Structured output: grammars, and the masks they put on logits."""
