"""What drafts gain, by drafter and batch size."""
