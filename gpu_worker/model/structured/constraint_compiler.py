"""Compiles what a schema, a regex, a grammar or a list of choices lets come next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.sampling_options import SamplingOptions

from .compile_sandbox import CompileSandbox, UnsafeConstraint
from .constraint_state import ConstraintFollower, ConstraintState, MatcherPosition
from .matcher import ConstraintError, compile_matcher, word_list

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["CompiledConstraint", "ConstraintCompiler"]

_KEPT = 128
"""Compiled constraints kept for requests that bring the same one; about 50 KiB each."""

_SUPPORTED = {
    "json_schema": "a JSON Schema of the supported kind",
    "regex": "a regular expression without look-around and back-references",
    "grammar": "a context-free grammar in Lark's notation",
    "choice": "texts that the model can write",
}

_NO_CONSTRAINT = ("regex", "")

_Source = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """What one request asks for, compiled: gives each of its sequences a state to begin with."""

    field: str
    template: LLMatcher
    num_words: int
    stop_token_ids: tuple[int, ...]

    def __call__(self) -> ConstraintFollower:
        """At the beginning of an output. Takes microseconds."""
        position = MatcherPosition(self.template.deep_copy(), self.num_words, self.stop_token_ids)
        return ConstraintFollower(ConstraintState(self.field, position))


class ConstraintCompiler:
    """Compiles the constraints of requests. Thread-safe.

    A constraint is compiled in a :class:`CompileSandbox` first, and here only if that succeeded.
    The sandbox has a smaller stack than the threads of the engine process, so what survives there
    overflows none of them.

    Args:
        tokenizer: of transformers, a fast one.
        vocab_size: the width of the model's logits.
        eos_token_ids: ids that end a text of the model.
        limit_s: seconds that compiling may take.

    Attributes:
        sandbox: where constraints are compiled first; the first constraint starts it.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        limit_s: float = 10.0,
    ) -> None:
        self._tokenizer = _tokenizer_json(tokenizer)
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._templates: OrderedDict[tuple[str, _Source], LLMatcher] = OrderedDict()
        self.sandbox = CompileSandbox(
            self._tokenizer or "", self._vocab_size, sorted(eos_token_ids), limit_s=limit_s
        )

    def close(self) -> None:
        """End the sandbox."""
        self.sandbox.close()

    def prepare(self) -> None:
        """Make ready what every constraint needs: the tokenizer's words, here and in the sandbox.

        Raises:
            RuntimeError: the compile server cannot be started.
        """
        with suppress(InvalidRequest, ConstraintError):  # `compile` says what is wrong
            self._word_list(*_NO_CONSTRAINT)
            self.sandbox.prepare()

    def compile(self, options: SamplingOptions) -> CompiledConstraint | None:
        """The constraint of a request with these options; None if it has none.

        Raises:
            InvalidRequest: the schema, regex or grammar is malformed, asks for something that is
                not supported, describes nothing, or is too complex.
        """
        field = options.constraint
        if field is None:
            return None
        if not self._eos_token_ids and not options.stop_token_ids:
            allowed = "nothing, or stop_token_ids beside it: this model has no end-of-text token"
            raise InvalidRequest(field, getattr(options, field), allowed)
        key = field, getattr(options, field)
        with self._lock:
            template = self._templates.get(key)
            if template is not None:
                self._templates.move_to_end(key)
        if template is None:
            template = self._compile(*key)
            with self._lock:
                self._templates[key] = template
                while len(self._templates) > _KEPT:
                    self._templates.popitem(last=False)
        return CompiledConstraint(
            field, template, -(-self._vocab_size // 32), options.stop_token_ids
        )

    def _compile(self, field: str, source: _Source) -> LLMatcher:
        words = self._word_list(field, source)
        try:
            self.sandbox.check(field, source)
            return compile_matcher(words, field, source)
        except UnsafeConstraint as error:
            raise InvalidRequest(field, source, f"{_SUPPORTED[field]}; {error}") from None
        except ConstraintError as error:
            raise InvalidRequest(field, source, f"{_SUPPORTED[field]}; it says: {error}") from None

    def _word_list(self, field: str, source: object) -> LLTokenizer:
        """Made for the first request that needs it."""
        with self._lock:
            if self._words is None:
                try:
                    if self._tokenizer is None:
                        raise ConstraintError("it is no fast tokenizer")
                    eos_token_ids = sorted(self._eos_token_ids)
                    self._words = word_list(self._tokenizer, self._vocab_size, eos_token_ids)
                except ConstraintError as error:
                    allowed = f"nothing: this model's tokenizer cannot be followed ({error})"
                    raise InvalidRequest(field, source, allowed) from error
            return self._words


def _tokenizer_json(tokenizer: Any) -> str | None:
    """The tokenizer of the tokenizers library inside, in its JSON form; None if there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    if backend.padding is None and backend.truncation is None:
        return str(backend.to_str())
    plain = copy(backend)
    plain.no_padding()
    plain.no_truncation()
    return str(plain.to_str())
