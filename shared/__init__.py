"""The contract between producers and workers: protocol, keys, scripts, settings, errors.

This package imports neither ``penstock.producer`` nor ``penstock.gpu_worker``; both import it.
"""
