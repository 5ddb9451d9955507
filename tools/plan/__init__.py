"""``penstock plan``: what a model needs in memory, before anything is loaded."""
