"""Structured output: what a schema, a regex, a grammar or a list of choices lets come next.

llguidance reads them and follows an output byte by byte, over the bytes of the model's own tokens.
It makes a mask for the present state when it is asked for (Moskal et al., "LLGuidance: Making
Structured Outputs Go Brrr", 2025) and nothing ahead, so that a grammar is ready in a millisecond.

A state is a function of the grammar and the output's ids. So nothing of it is stored or sent: a
worker that continues a request replays its ids, and stands where the first one stood.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import SamplingOptions

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Follower", "Grammar", "GrammarCompiler", "GrammarError", "GrammarState", "Place"]

_KEPT = 128
"""Compiled grammars kept for requests that bring the same one; about 50 KiB each."""

_WHITESPACE = " ?"
"""Between the parts of a JSON value at most one space. As much as the model likes would be valid,
too, and a model that has begun to write spaces may never end. A schema can say otherwise in
``x-guidance``."""

_QUICK_S = 0.001
"""What a mask may take if there are to be drafts: most take a tenth of it."""


class GrammarError(Exception):
    """A sequence cannot go on in its grammar: it is too complex, or an id does not follow."""


class Place:
    """A place in a grammar.

    Args:
        matcher: this place's alone.
        num_words: 32-bit words of a mask.
        stop_token_ids: ids that may come where the output may end.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._stop_token_ids = tuple(stop_token_ids)

    def copy(self) -> Place:
        """The same place, to go on from by other ids. Takes a microsecond."""
        return Place(self._matcher.deep_copy(), self._num_words, self._stop_token_ids)

    def empty_mask(self) -> Tensor:
        """Allows nothing: int32 ``[num_words]`` on the host."""
        return torch.zeros(self._num_words, dtype=torch.int32)

    def skip(self, token_ids: Sequence[int]) -> None:
        """Go on by these ids. What is wrong with them is found by :meth:`advance`."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))

    def advance(self, token_ids: Sequence[int], mask: Tensor) -> None:
        """Go on by these ids, and make the mask of what may follow.

        Args:
            token_ids: none to stay here.
            mask: to be filled: bit ``i % 32`` of word ``i // 32`` tells whether token ``i`` may
                come next.

        Raises:
            GrammarError: there is none.
        """
        self.skip(token_ids)
        matcher = self._matcher
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        if self._stop_token_ids and matcher.is_accepting():
            bits = mask.numpy().view("uint32")
            for token_id in self._stop_token_ids:
                bits[token_id >> 5] |= 1 << (token_id & 31)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, may follow in a row; nothing changes."""
        return self._matcher.validate_tokens(list(token_ids))


class GrammarState:
    """Where one output is in its grammar. Used by one thread at a time.

    Args:
        field: the request's field, for messages.
        place: the beginning of the output.
    """

    def __init__(self, field: str, place: Place) -> None:
        self.field = field
        self._place = place
        self._masks = [place.empty_mask()]
        self._num_made = 0

    def fill(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Go on by these output ids, and make the masks of what may follow them and each draft.

        Drafts are not gone on by: the next call says which of them became output. Where they leave
        the grammar, or it becomes too complex, the masks behind them allow nothing.

        Raises:
            GrammarError: nothing may follow the output.
        """
        self._num_made = 0
        self._place.advance(token_ids, self._masks[0])
        self._num_made = 1
        if not drafts:
            return
        ahead = self._place.copy()
        for number, draft in enumerate(drafts, start=1):
            if number == len(self._masks):
                self._masks.append(ahead.empty_mask())
            try:
                ahead.advance((draft,), self._masks[number])
            except GrammarError:
                return
            self._num_made = number + 1

    def masks(self, count: int) -> list[Tensor]:
        """``count`` masks int32 ``[words]`` on the host: of the next token, and behind each draft.

        As :meth:`fill` was last asked for them.
        """
        made = self._masks[: min(count, self._num_made)]
        return made + [self._place.empty_mask() for _ in range(count - len(made))]

    def ahead(self) -> Place:
        """The place after the last :meth:`fill`, to go on from without changing this."""
        return self._place.copy()

    def allowed_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, may follow the output in a row.

        The output is that of the last :meth:`fill`; nothing changes.
        """
        return self._place.num_valid(token_ids)


class Follower:
    """A sequence's grammar state, and what the threads of :mod:`.masks` have to do with it.

    It is the :class:`Form` that the engine asks.

    Attributes:
        state: touched by a thread while ``busy``, and by nobody else then.
        num_followed: output tokens that were handed to it.
        drafts: and drafts behind them.
        busy: a thread has it, or will.
        late: a step has waited for it in vain.
        began: monotonic time in seconds when a thread took it; infinite while none has yet.
        seconds: CPU time of a mask, when it was last asked for some.
        error: why it cannot go on.
    """

    __slots__ = (
        "began",
        "busy",
        "drafts",
        "error",
        "late",
        "num_followed",
        "seconds",
        "state",
    )

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.num_followed = -1  # not even the beginning has a mask
        self.drafts: tuple[int, ...] = ()
        self.busy = self.late = False
        self.began = self.seconds = 0.0
        self.error: Exception | None = None

    @property
    def may_draft(self) -> bool:
        """See :class:`Form`: no thread has it, and its masks are made in no time.

        A sequence with drafts needs a mask for each, and its step waits for all of them.
        """
        idle = not self.busy and self.error is None and self.num_followed >= 0
        return idle and self.seconds <= _QUICK_S

    def num_allowed(
        self, token_ids: Sequence[int], num_prompt_tokens: int, drafts: Sequence[int]
    ) -> int:
        """See :class:`Form`."""
        new = token_ids[num_prompt_tokens + self.num_followed :]
        return max(0, self.state.allowed_prefix([*new, *drafts]) - len(new))

    def ahead(self, token_ids: Sequence[int], num_prompt_tokens: int) -> Place:
        """The place behind this output, to go on from by drafts.

        Args:
            token_ids: prompt and output.
            num_prompt_tokens: how many of them are the prompt.
        """
        place = self.state.ahead()
        place.skip(token_ids[num_prompt_tokens + self.num_followed :])
        return place


@dataclass(frozen=True, slots=True)
class Grammar:
    """What one request asks for, compiled: gives each of its sequences a state to begin with."""

    field: str
    template: LLMatcher
    num_words: int
    stop_token_ids: tuple[int, ...]

    def __call__(self) -> Follower:
        """At the beginning of an output. Takes microseconds."""
        place = Place(self.template.deep_copy(), self.num_words, self.stop_token_ids)
        return Follower(GrammarState(self.field, place))


class GrammarCompiler:
    """Compiles the constraints of requests. Thread-safe.

    Args:
        tokenizer: of transformers, a fast one.
        vocab_size: the width of the model's logits.
        eos_token_ids: ids that end a text of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._templates: OrderedDict[tuple[str, str | tuple[str, ...]], LLMatcher] = OrderedDict()

    def compile(self, options: SamplingOptions) -> Grammar | None:
        """The grammar of a request with these options; None if it may write what it likes.

        Raises:
            InvalidRequest: the schema, regex or grammar is none, asks for something that is not
                supported, describes nothing, or is too complex.
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
            template = self._template(*key)
            with self._lock:
                self._templates[key] = template
                while len(self._templates) > _KEPT:
                    self._templates.popitem(last=False)
        return Grammar(field, template, -(-self._vocab_size // 32), options.stop_token_ids)

    def _template(self, field: str, source: str | tuple[str, ...]) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        words = self._word_list(field, source)
        try:
            lark = _as_lark(field, source)
        except ValueError as error:  # nested deeper than the library reads
            raise _refusal(field, source, str(error)) from None
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(words, lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(field, source, matcher.get_error())
        place = Place(matcher.deep_copy(), -(-self._vocab_size // 32), ())
        try:
            place.advance((), place.empty_mask())
        except GrammarError as error:
            raise _refusal(field, source, f"no text has this form ({error})") from None
        return matcher

    def _word_list(self, field: str, source: object) -> LLTokenizer:
        """The bytes of the model's tokens, as a trie. Made for the first who needs it."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._words is None:
                try:
                    self._words = from_tokenizer(
                        self._tokenizer,
                        n_vocab=self._vocab_size,
                        eos_token=sorted(self._eos_token_ids) or None,
                    )
                except ValueError as error:
                    why = _first_line(str(error))
                    allowed = f"nothing: this model's tokenizer cannot be followed ({why})"
                    raise InvalidRequest(field, source, allowed) from error
            return self._words


def _as_lark(field: str, source: str | tuple[str, ...]) -> str:
    from llguidance import LLMatcher

    if isinstance(source, tuple):
        words = (json.dumps(text, ensure_ascii=False) for text in source)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(words)}")
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            source, defaults={"whitespace_pattern": _WHITESPACE}
        )
    if field == "regex":
        return LLMatcher.grammar_from_regex(source)
    return LLMatcher.grammar_from_lark(source)


def _refusal(field: str, source: object, why: str) -> InvalidRequest:
    kinds = {
        "json_schema": "a JSON Schema of the supported kind",
        "regex": "a regular expression without look-around and back-references",
        "grammar": "a context-free grammar in Lark's notation",
        "choice": "texts that the model can write",
    }
    return InvalidRequest(field, source, f"{kinds[field]}; it says: {_first_line(why)}")


def _first_line(text: str) -> str:
    return " ".join(text.split())[:300]
