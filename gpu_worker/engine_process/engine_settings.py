"""The one place where settings become the engine's configuration."""

from __future__ import annotations

from penstock.shared.settings import EngineSettings

from ..engine.config import EngineConfig
from ..engine.scheduling.scheduler_config import Chunking

__all__ = ["engine_config"]


def engine_config(
    settings: EngineSettings,
    *,
    num_blocks: int,
    max_model_len: int,
    auto_batch_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
    vocab_size: int | None = None,
) -> EngineConfig:
    """Return the configuration that settings ask for.

    Args:
        settings: the section ``engine``.
        num_blocks: KV blocks in the pool.
        max_model_len: most tokens of prompt and output together.
        auto_batch_tokens: what ``max_batch_tokens`` of ``auto`` means while prompts are divided.
            Without chunks it is at least the longest sequence and a token of each other one.
        eos_token_ids: ids that end the output.
        vocab_size: token ids are below it; None: requests may name any.

    Raises:
        ConfigurationError: two settings contradict each other, or the model.
    """
    longest = max_model_len + settings.max_sequences if settings.chunking == "off" else 0
    batch_tokens = settings.max_batch_tokens or max(
        auto_batch_tokens, longest, settings.max_sequences
    )
    return EngineConfig(
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_batch_tokens=batch_tokens,
        max_sequences=settings.max_sequences,
        chunk_size=settings.chunk_size or batch_tokens,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
        prefix_cache=settings.prefix_cache,
        salt_by_tenant=settings.salt_by_tenant,
        policy=settings.policy,
        max_overtake_s=settings.max_overtake_s,
        chunking=Chunking(settings.chunking),
        target_itl_s=settings.target_itl_ms / 1000,
        min_chunk_size=settings.min_chunk_size,
        preemption=settings.preemption,
    )
