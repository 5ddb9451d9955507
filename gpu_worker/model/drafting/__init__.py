"""Drafts on the device: proposing them and verifying them."""
