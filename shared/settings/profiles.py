"""Profiles: documented sets of settings for one aim, which any setting given beside them overrules.

What each gains and costs is measured in ``docs/performance.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PROFILES"]

PROFILES: Mapping[str, Mapping[str, object]] = {
    "balanced": {},
    # Whole prompts in a step, and many streams: tokens per second before the time of any one.
    "throughput": {
        "engine.max_sequences": 256,
        "engine.max_batch_tokens": 1024,
        "worker.claim_batch": 64,
        "worker.stream_interval_ms": 50,
    },
    # Few streams, and prompts read in pieces that the others hardly notice.
    "latency": {
        "engine.max_sequences": 8,
        "engine.chunking": "adaptive",
        "engine.target_itl_ms": 25.0,
        "worker.stream_interval_ms": 0,
    },
    # Weights and KV in 8 bits where they can be, and no second place for either.
    "memory": {
        "model.quantization": "prefer-int8",
        "model.kv_cache_dtype": "prefer-8bit",
        "engine.max_sequences": 16,
        "engine.kv_memory": "256MiB",
        "engine.swap_memory": 0,
    },
}
"""Settings by dotted name, of each value of ``worker.profile``."""
