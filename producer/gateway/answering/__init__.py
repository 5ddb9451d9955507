"""Answers to requests: as events or whole, for the first time or again."""
