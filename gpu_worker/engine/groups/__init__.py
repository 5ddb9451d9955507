"""Requests with several sequences: n, best_of and beam search."""
