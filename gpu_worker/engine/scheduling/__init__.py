"""Which sequences compute how many tokens in a step, and who waits."""
