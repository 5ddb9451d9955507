"""Commands about batch files and schedules."""
