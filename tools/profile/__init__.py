"""`penstock profile`: where a step's time goes, what bounds it, and which setting to change."""
