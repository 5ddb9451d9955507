"""Batch files, webhooks and schedules: work that nobody waits for, driven by arq.

The state of every batch, file and delivery is ours, in Redis; bodies are files. arq only says when
to look at which, so that a job of arq may run twice, or die at any instruction, without harm.
"""
