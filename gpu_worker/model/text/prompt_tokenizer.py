"""From a request's prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.chat.chat_options import ChatOptions

from .chat_prompt import ChatPrompt

__all__ = ["encode_prompt"]


def encode_prompt(
    tokenizer: Any,
    prompt: object,
    *,
    vocab_size: int | None = None,
    chat_prompt: ChatPrompt | None = None,
    chat: ChatOptions | None = None,
) -> list[int]:
    """The token ids of a prompt in any of its three forms.

    Args:
        tokenizer: of transformers.
        prompt: *text*, encoded with the special tokens the tokenizer puts around text; *token ids*,
            taken as they are; or *chat messages* (``{"role": ..., "content": ...}``), rendered with
            the model's chat template, up to where the assistant's answer begins.
        vocab_size: ids are below it: the width of the model's embedding, which may be more than
            the tokenizer has words. None takes the tokenizer's.
        chat_prompt: renders messages; None makes one.
        chat: what the request says to it; None says nothing.

    Raises:
        InvalidRequest: an id is out of range, or the prompt has no tokens. Or the model has no chat
            template, or it refuses the messages or an option.
    """
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequest("prompt", prompt, "text, token ids or chat messages")
    elif prompt and isinstance(prompt[0], Mapping):
        renderer = ChatPrompt(tokenizer) if chat_prompt is None else chat_prompt
        ids = renderer.encode(prompt, ChatOptions() if chat is None else chat)
    else:
        ids = _check_ids(prompt, len(tokenizer) if vocab_size is None else vocab_size)
    if not ids:
        raise InvalidRequest("prompt", prompt, "a prompt that has at least one token")
    if vocab_size is not None and max(ids) >= vocab_size:
        # A tokenizer may have words that were added after the model was made.
        word = tokenizer.convert_ids_to_tokens(max(ids))
        allowed = f"a prompt without {word!r}, which this model has no embedding for"
        raise InvalidRequest("prompt", prompt, allowed)
    return ids


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    try:
        # verbose: a prompt longer than the context is the engine's to refuse, not a warning.
        return list(tokenizer(text, verbose=False)["input_ids"])
    except (TypeError, UnicodeEncodeError) as error:
        # The tokenizers library takes only what has a UTF-8 form.
        raise InvalidRequest("prompt", text, "text that has a UTF-8 form") from error


def _check_ids(ids: Sequence[Any], vocab_size: int) -> list[int]:
    for position, token_id in enumerate(ids):
        valid = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not valid or not 0 <= token_id < vocab_size:
            allowed = f"a token id from 0 to {vocab_size - 1}, this model's vocabulary"
            raise InvalidRequest(f"prompt[{position}]", token_id, allowed)
    return list(ids)
