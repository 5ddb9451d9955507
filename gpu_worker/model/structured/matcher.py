"""From a request's constraint to a matcher of llguidance.

Both the compile server and the engine process run this, so it imports no torch. The library
llguidance follows an output byte by byte, over the bytes of the model's own tokens. It makes a mask
for the present state on demand, and nothing ahead. So most constraints are ready in a millisecond
(Moskal et al., "LLGuidance: Making Structured Outputs Go Brrr", 2025).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.shared.quoting import one_line

__all__ = ["ConstraintError", "compile_matcher", "first_line", "word_list"]

_WHITESPACE = " ?"
"""Between the parts of a JSON value at most one space. Any amount would be valid, too, but a model
that has begun to write spaces may never end. A schema can say otherwise in ``x-guidance``."""

_MAX_MESSAGE = 300


class ConstraintError(Exception):
    """A constraint is invalid or too complex, or an output does not follow it."""


def word_list(tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of a model's tokens, as a trie. Takes a tenth of a second or more.

    Args:
        tokenizer: of the tokenizers library, in its JSON form.
        vocab_size: the width of the model's logits.
        eos_token_ids: ids that end a text of the model.

    Raises:
        ConstraintError: the bytes of this tokenizer's tokens cannot be told.
    """
    try:
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        raise ConstraintError(first_line(str(error))) from error


def compile_matcher(words: LLTokenizer, field: str, source: str | Sequence[str]) -> LLMatcher:
    """A matcher at the beginning of an output.

    Args:
        words: of the model.
        field: ``json_schema``, ``regex``, ``grammar`` (Lark's notation) or ``choice``.
        source: the constraint; a list of texts for ``choice``.

    Raises:
        ConstraintError: it is malformed or unsupported, describes no text, or is too complex.
    """
    try:
        grammar = _grammar(field, source)
    except ValueError as error:  # nested deeper than the library reads
        raise ConstraintError(first_line(str(error))) from None
    matcher = LLMatcher(words, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise ConstraintError(first_line(matcher.get_error()))
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    if trial.is_error():
        raise ConstraintError(f"no text has this form ({first_line(trial.get_error())})")
    return matcher


def first_line(text: str) -> str:
    """A message of the library, which quotes the constraint, in one printable line."""
    return one_line(" ".join(text.split()), _MAX_MESSAGE)


def _grammar(field: str, source: str | Sequence[str]) -> str:
    if not isinstance(source, str):
        words = (json.dumps(text) for text in source)  # Lark takes no control characters as such
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(words)}")
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            source, defaults={"whitespace_pattern": _WHITESPACE}
        )
    if field == "regex":
        return LLMatcher.grammar_from_regex(source)
    return LLMatcher.grammar_from_lark(source)
