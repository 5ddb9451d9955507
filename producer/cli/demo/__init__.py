"""``penstock demo``: the main job on this machine."""
