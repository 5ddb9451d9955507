"""Which sequences run, and how many tokens each computes in a step."""
