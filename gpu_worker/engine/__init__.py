"""The pure engine: which tokens to compute next, in which blocks, and when a request ends.

No file here imports Redis, asyncio or torch, so everything can be tested in milliseconds and
simulated in virtual time. Read in this order: ``sequence``, ``plan``, ``engine``, then
``scheduling/scheduler``, ``kv/kv_manager``, ``output/output_state``. Read ``groups/`` and
``speculation/`` when you need them.
"""
