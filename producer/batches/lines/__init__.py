"""Lines of batch files: checked, ordered, submitted and collected."""
