"""Batch files, webhooks and schedules: work in the background, driven by arq.

Penstock keeps the state of every batch, file and delivery in Redis, and bodies in files. Of arq it
only learns when to look at which. So a job of arq may run twice, or die at any instruction, without
harm.
"""
