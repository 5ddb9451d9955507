"""Which requests this engine refuses: options its model lacks, and lengths that can never fit."""

from __future__ import annotations

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason

from ..config import EngineConfig
from ..kv.kv_manager import KVManager
from ..sequence import Sequence
from .engine_request import Finish

__all__ = ["RequestValidator"]

_TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")


class RequestValidator:
    """Gives the ends of requests that cannot run here, and bounds the length of the others.

    Only a worker can check these: it knows the model's vocabulary, its context and the KV pools.

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

    def refuse(self, sequence: Sequence) -> Finish | None:
        """The end of a new request whose prompt or options this model cannot serve."""
        finish = self._prompt_too_long(sequence)
        return finish or self.refuse_options(sequence.options, sequence.num_prompt_tokens)

    def refuse_options(self, options: SamplingOptions, num_prompt_tokens: int = 1) -> Finish | None:
        """The end of a request whose options this model cannot serve.

        They name token ids outside its vocabulary, leave no id to choose, or ask for
        log-probabilities of too long a prompt.
        """
        try:
            _check_known_ids(options, self.config.vocab_size)
            _check_choice_left(options, self.config)
            options.check_prompt(num_prompt_tokens)
        except InvalidRequest as error:
            return Finish(Reason.INVALID, str(error))
        return None

    def too_large(self, sequence: Sequence) -> Finish | None:
        """The end of a sequence whose next token the pool could not hold, even were it alone."""
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

    def search_too_large(self, sequence: Sequence) -> Finish | None:
        """The end of a beam search that may need more than there is.

        Its beams advance together, so all of them must fit at once. They are counted as if they
        shared nothing and all reached the full length, which they may.
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

    def max_output_tokens(self, sequence: Sequence) -> int:
        """Output tokens at which a sequence has its full length."""
        room = self.config.max_model_len - sequence.num_prompt_tokens
        return min(sequence.options.max_tokens, room)

    def _prompt_too_long(self, sequence: Sequence) -> Finish | None:
        num_needed, max_model_len = sequence.num_prompt_tokens + 1, self.config.max_model_len
        if num_needed <= max_model_len:
            return None
        message = (
            f"the prompt has {sequence.num_prompt_tokens} tokens and needs {num_needed} with one "
            f"token of output; the model's context holds {max_model_len}: shorten the prompt"
        )
        return Finish(Reason.PROMPT_TOO_LONG, message)


def _check_known_ids(options: SamplingOptions, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    allowed = f"a token id from 0 to {vocab_size - 1}, this model's vocabulary"
    for field in _TOKEN_LISTS:
        for index, token_id in enumerate(getattr(options, field)):
            if token_id >= vocab_size:
                raise InvalidRequest(f"{field}[{index}]", token_id, allowed)
    for token_id in options.logit_bias or ():
        if token_id >= vocab_size:
            raise InvalidRequest(f"logit_bias[{token_id}]", token_id, allowed)


def _check_choice_left(options: SamplingOptions, config: EngineConfig) -> None:
    if not (options.banned_token_ids or options.allowed_token_ids or options.min_tokens):
        return
    never = set(options.banned_token_ids)
    if options.min_tokens:
        never |= options.ending_ids(config.eos_token_ids)
    if options.allowed_token_ids:
        if never.issuperset(options.allowed_token_ids):
            allowed = (
                "at least one id that is not banned and, with min_tokens, does not end the output"
            )
            raise InvalidRequest("allowed_token_ids", options.allowed_token_ids, allowed)
    elif config.vocab_size is not None and len(never) >= config.vocab_size:
        allowed = f"ids that leave one of this model's {config.vocab_size} to choose"
        raise InvalidRequest("banned_token_ids", options.banned_token_ids, allowed)
