"""What is too large for an engine: the ends of requests that can never fit."""

from __future__ import annotations

from penstock.shared.protocol import Reason

from .config import EngineConfig
from .kv.kv_manager import KVManager
from .requests import Finish
from .sequence import Sequence

__all__ = ["Limits"]


class Limits:
    """How long a sequence may get in this engine.

    Args:
        config: of the engine.
        kv: owns its pools.

    Attributes:
        config: of the engine.
        pool_tokens: tokens of the longest sequence that fits into the pools alone.
    """

    def __init__(self, config: EngineConfig, kv: KVManager) -> None:
        self.config = config
        self.pool_tokens = kv.capacity_tokens
        self._pools = kv.pools

    def prompt_too_long(self, sequence: Sequence) -> Finish | None:
        """The end of a sequence whose prompt leaves the context no room."""
        num_needed, max_model_len = sequence.num_prompt_tokens + 1, self.config.max_model_len
        if num_needed <= max_model_len:
            return None
        message = (
            f"the prompt has {sequence.num_prompt_tokens} tokens and needs {num_needed} with one "
            f"token of output; the model's context holds {max_model_len}: shorten the prompt"
        )
        return Finish(Reason.PROMPT_TOO_LONG, message)

    def too_large(self, sequence: Sequence) -> Finish | None:
        """The end of a sequence whose next token the pool could not give, even were it alone."""
        num_tokens = sequence.num_tokens
        if num_tokens <= self.pool_tokens:
            return None
        short = next(pool for pool in self._pools if num_tokens > pool.capacity_tokens)
        layers = (
            "" if short.window is None else f" in layers with a window of {short.window} tokens"
        )
        message = (
            f"{num_tokens} tokens need {short.blocks_needed(num_tokens)} KV blocks of "
            f"{short.block_size} tokens{layers}; the pool has {short.num_blocks} "
            f"({short.capacity_tokens} tokens): raise the KV memory budget or ask for less"
        )
        return Finish(Reason.OUT_OF_MEMORY, message)

    def max_output_tokens(self, sequence: Sequence) -> int:
        """Output tokens at which a sequence has its full length."""
        room = self.config.max_model_len - sequence.num_prompt_tokens
        return min(sequence.options.max_tokens, room)

    def search_too_large(self, sequence: Sequence) -> Finish | None:
        """The end of a beam search that may need more than there is.

        Its beams advance together, so all of them must fit at once: counted as if they shared
        nothing and went on to the last token, because that is how far they may come.
        """
        width, most = sequence.options.beam_width, self.config.max_sequences
        if width > most:
            message = (
                f"beam_width is {width}; allowed: at most {most}, the sequences that this worker "
                "runs at the same time (engine.max_sequences)"
            )
            return Finish(Reason.INVALID, message)
        longest = sequence.num_prompt_tokens + self.max_output_tokens(sequence)
        for pool in self._pools:
            num_needed = width * pool.blocks_needed(longest)
            if num_needed > pool.num_blocks:
                message = (
                    f"{width} beams of up to {longest} tokens need {num_needed} KV blocks of "
                    f"{pool.block_size} tokens; the pool has {pool.num_blocks}: raise the KV "
                    "memory budget or lower beam_width or max_tokens"
                )
                return Finish(Reason.OUT_OF_MEMORY, message)
        return None
