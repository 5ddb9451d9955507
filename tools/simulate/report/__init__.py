"""The outcome of a simulation: the comparison, as a table and as a picture."""
