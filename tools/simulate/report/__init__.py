"""The outcome of a simulation: what is compared, as a table and as a picture."""
