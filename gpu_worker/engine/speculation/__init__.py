"""Speculative decoding: how many tokens to draft for each sequence, and where drafts come from."""
