"""A checkpoint's fast tokenizer that works before transformers is imported, which takes seconds."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

__all__ = ["DeferredTokenizer"]


class DeferredTokenizer:
    """Encodes and decodes by the tokenizers library; asks transformers' tokenizer for the rest.

    Only for tokenizers that add nothing of their own to the library's encoding and decoding. The
    rest, chat templates above all, is loaded by :meth:`load_rest` or when it is first used.
    Thread-safe.

    Args:
        folder: of the checkpoint, with a ``tokenizer.json``.
        load: loads transformers' tokenizer of a folder.

    Attributes:
        backend_tokenizer: of the tokenizers library.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self._folder = folder
        self._load = load
        self._lock = threading.Lock()
        self._rest: Any = None

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = False
    ) -> dict[str, list[int]]:
        """``input_ids`` of a text, with or without the special tokens that are put around text."""
        del verbose
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}

    def __len__(self) -> int:
        """Words of the vocabulary, added ones included."""
        return int(self.backend_tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        """All words."""
        words: dict[str, int] = self.backend_tokenizer.get_vocab()
        return words

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary's entry; None if there is none."""
        word: str | None = self.backend_tokenizer.id_to_token(ids)
        return word

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """The ids of vocabulary entries; None where there is none."""
        return [self.backend_tokenizer.token_to_id(token) for token in tokens]

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added words, special ones among them, by id."""
        added: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """The ids of the added words."""
        return {word.content: number for number, word in self.added_tokens_decoder.items()}

    def load_rest(self) -> Any:
        """Transformers' tokenizer; waits for it.

        Raises:
            ModelNotFound: the checkpoint's tokenizer files have been damaged since it was recorded.
        """
        with self._lock:
            if self._rest is None:
                self._rest = self._load(self._folder)
            return self._rest

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.load_rest(), memo)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load_rest(), name)
