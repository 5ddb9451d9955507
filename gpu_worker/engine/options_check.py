"""Options that only a worker can judge, because it knows the model's vocabulary."""

from __future__ import annotations

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import Reason, SamplingOptions

from .config import EngineConfig
from .requests import Finish

__all__ = ["refuse_options"]

_LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")


def refuse_options(
    options: SamplingOptions, config: EngineConfig, num_prompt_tokens: int = 1
) -> Finish | None:
    """The end of a request whose options name ids the model does not have, or leave it none.

    Or ask for a report of a prompt that is too long for one.
    """
    try:
        _check(options, config)
        options.check_prompt(num_prompt_tokens)
    except InvalidRequest as error:
        return Finish(Reason.INVALID, str(error))
    return None


def _check(options: SamplingOptions, config: EngineConfig) -> None:
    vocab_size = config.vocab_size
    if vocab_size is not None:
        allowed = f"a token id from 0 to {vocab_size - 1}, this model's vocabulary"
        for field in _LISTS:
            for index, token_id in enumerate(getattr(options, field)):
                if token_id >= vocab_size:
                    raise InvalidRequest(f"{field}[{index}]", token_id, allowed)
        for token_id in options.logit_bias or ():
            if token_id >= vocab_size:
                raise InvalidRequest(f"logit_bias[{token_id}]", token_id, allowed)
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
    elif vocab_size is not None and len(never) >= vocab_size:
        allowed = f"ids that leave one of this model's {vocab_size} to choose"
        raise InvalidRequest("banned_token_ids", options.banned_token_ids, allowed)
