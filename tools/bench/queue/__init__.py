"""What the way through Redis costs, and how long it takes."""
