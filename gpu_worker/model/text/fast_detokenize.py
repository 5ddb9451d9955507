"""The fastest way from token ids to text that a tokenizer offers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from .detokenizer import Decoder

__all__ = ["decoder_of"]


def decoder_of(tokenizer: Any) -> Decoder:
    """A decoder that gives the same text as ``tokenizer``, in less time.

    Before transformers calls the Rust library it inspects every id in Python, which takes longer
    than decoding a few ids. So this calls the library directly, unless the tokenizer's class
    overrides decoding.
    """
    for kind in type(tokenizer).__mro__:
        if kind is PreTrainedTokenizerFast:
            return _Library(tokenizer)
        if {"decode", "_decode"} & vars(kind).keys():
            break  # this model's tokenizer does something of its own
    found: Decoder = tokenizer
    return found


class _Library:
    """Decodes by the tokenizers library, and leaves the rest to the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.backend_tokenizer.decode
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """The text of ``token_ids``; cleaning up is left out here, as the detokeniser asks."""
        del clean_up_tokenization_spaces
        text: str = self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text
