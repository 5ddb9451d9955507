"""The fastest way from token ids to text that a tokenizer offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .deferred_tokenizer import DeferredTokenizer
from .detokenizer import Decoder

__all__ = ["decoder_of", "decodes_by_library", "is_plain"]


def decoder_of(tokenizer: Any) -> Decoder:
    """A decoder that gives the same text as ``tokenizer``, in less time.

    Before transformers calls the Rust library it inspects every id in Python, which takes longer
    than decoding a few ids. So this calls the library directly, unless the tokenizer's class
    overrides decoding.
    """
    if decodes_by_library(tokenizer):
        return _Library(tokenizer)
    found: Decoder = tokenizer
    return found


def decodes_by_library(tokenizer: Any) -> bool:
    """Whether the tokenizers library alone decodes what ``tokenizer`` does."""
    return isinstance(tokenizer, DeferredTokenizer) or not _overrides(tokenizer, _DECODING)


def is_plain(tokenizer: Any, folder: Path) -> bool:
    """Whether the tokenizers library alone encodes and decodes what ``tokenizer`` does.

    Args:
        tokenizer: of transformers.
        folder: the checkpoint it came from.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() or _overrides(tokenizer, _DECODING | _ENCODING):
        return False
    library = tokenizer.backend_tokenizer
    if getattr(library, "encode_special_tokens", False):
        return False
    plain, same = Tokenizer.from_file(str(path)), Tokenizer.from_str(library.to_str())
    for one in (plain, same):
        one.no_truncation()
        one.no_padding()
    return bool(plain.to_str() == same.to_str())


_DECODING = frozenset({"decode", "_decode"})
_ENCODING = frozenset({"__call__", "_encode_plus", "_call_one", "encode"})


def _overrides(tokenizer: Any, names: frozenset[str]) -> bool:
    """Whether its class has methods of its own in place of transformers' for fast tokenizers."""
    from transformers import PreTrainedTokenizerFast

    for kind in type(tokenizer).__mro__:
        if kind is PreTrainedTokenizerFast:
            return False
        if names & vars(kind).keys():
            return True
    return True


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
