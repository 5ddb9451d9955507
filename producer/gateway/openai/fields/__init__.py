"""The fields of request bodies: one declaration each, and what follows from it."""
