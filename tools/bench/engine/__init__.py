"""What the engine gives, and what its parts cost."""
