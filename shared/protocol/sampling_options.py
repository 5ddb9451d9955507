"""How tokens are chosen and when a request stops: the part of a request the sampler reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import InvalidRequest
from . import field_checks as check
from . import output_constraint as constraints
from .states import Speculation

__all__ = ["SamplingOptions"]

MAX_TOKENS = 1 << 17
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_BIASES = 300
MAX_LISTED_TOKENS = 4096
MAX_LOGPROBS = 20
MAX_PROMPT_FIGURES = 1 << 16
MAX_CHOICES = 64

_PENALTIES = (
    ("repetition_penalty", 0.1, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)

_NOT_WITH_BEAMS = (
    ("best_of", None),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("min_p", 0.0),
    ("stop", ()),
    ("top_k", 0),
    ("top_p", 1.0),
    ("json_schema", None),
    ("regex", None),
    ("grammar", None),
    ("choice", ()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when a request stops.

    Attributes:
        max_tokens: output tokens at most, 1 to 131072.
        temperature: 0 is greedy; up to 10.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1] (Holtzman et al.,
            2019, "The Curious Case of Neural Text Degeneration").
        min_p: of what top-k and top-p left, keep tokens at least this many times as likely as the
            most likely one, in [0, 1] (Nguyen et al., 2024, "Turning Up the Heat: Min-p Sampling
            for Creative and Coherent LLM Outputs").
        repetition_penalty: for tokens of prompt and output, divides positive logits and multiplies
            the others, 0.1 to 10; above 1 makes repetition less likely (Keskar et al., 2019,
            "CTRL").
        presence_penalty: subtracted from the logits of tokens in the output, -2 to 2.
        frequency_penalty: the same, times the number of times they are there, -2 to 2.
        logit_bias: up to 300 token ids and what is added to their logits, -100 to 100. Ids may be
            written as decimal text, as JSON does; None for none.
        allowed_token_ids: the only ids that may be chosen, up to 4096; none: all may.
        banned_token_ids: up to 4096 ids that are never chosen.
        min_tokens: as long as the output has fewer tokens, no id that would end it is chosen; a
            stop string may still end it.
        logprobs: report the logarithms of the probabilities of each output token and of so many
            most likely ones, 0 to 20, as the model gives them, before all other options; None for
            no report.
        prompt_logprobs: report the same of the prompt's tokens but the first, once, with the first
            output token; at most 65,536 figures: (this + 1) times the prompt's tokens. None for no
            report.
        seed: 0 to 2**63 - 1; None derives it from the request id, so that a request that is
            continued by another worker draws the same random numbers.
        stop: up to 16 strings; output text ends before the first that appears.
        stop_token_ids: up to 64 ids that end the output like EOS does.
        ignore_eos: go on past the model's end-of-text token.
        n: outputs of the request, its *choices*, 1 to 64. Each draws its own random numbers.
        best_of: generate so many candidates, ``n`` to 64, and give the ``n`` whose tokens have the
            highest mean log-probability, the best first; None generates ``n``.
        beam_width: 2 to 64: search for the most likely output with so many beams, and give the
            ``n`` best, the best first; 1 does not search.
        length_penalty: of beam search: the sum of an output's log-probabilities is divided by its
            length to this power, -10 to 10; above 0 favours longer outputs.
        early_stopping: of beam search, once there are ``beam_width`` finished outputs: ``True``
            stops; ``False`` goes on while a beam would beat the worst of them if it ended now;
            ``"never"`` while one still could at its longest. As transformers defines them.
        json_schema: the output is a JSON value that this schema, an object or its JSON text of up
            to 65,536 bytes, describes. Of this and the next three at most one is given.
        regex: the output is a text that this expression, of up to 8,192 bytes, matches as a whole.
        grammar: the output is a text of this context-free grammar in Lark's notation, of up to
            65,536 bytes.
        choice: the output is one of these texts, up to 1024 of at most 1024 bytes, 65,536 in all.
        speculation: where drafts of coming tokens may come from. A wish: what the worker does not
            have is not used. Speed depends on it, the output does not.
        accept_threshold: above 0 **the output is no longer exactly the model's**: a draft that the
            model finds about as likely as this is taken, too, in [0, 1) (*typical acceptance* of
            Cai et al., 2024, "Medusa"). 0 is exact. Without effect where nothing is random.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range, or two contradict each other.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()
    speculation: Speculation = Speculation.AUTO
    accept_threshold: float = 0.0

    def __post_init__(self) -> None:
        put = object.__setattr__
        check.integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        put(self, "temperature", check.number("temperature", self.temperature, 0.0, 10.0))
        check.integer("top_k", self.top_k, 0, 2**31 - 1)
        put(self, "top_p", check.number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put(self, "min_p", check.number("min_p", self.min_p, 0.0, 1.0))
        for name, low, high in _PENALTIES:
            put(self, name, check.number(name, getattr(self, name), low, high))
        put(self, "logit_bias", _biases(self.logit_bias))
        for name in ("allowed_token_ids", "banned_token_ids"):
            ids = check.token_ids(name, getattr(self, name), MAX_LISTED_TOKENS, empty_ok=True)
            put(self, name, ids)
        if self.allowed_token_ids and not set(self.allowed_token_ids).difference(
            self.banned_token_ids
        ):
            allowed = "at least one id that is not in banned_token_ids, too"
            raise InvalidRequest("allowed_token_ids", self.allowed_token_ids, allowed)
        check.integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            check.integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check.integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            check.integer("seed", self.seed, 0, 2**63 - 1)
        put(self, "stop", check.strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES))
        stop_ids = check.token_ids(
            "stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS, empty_ok=True
        )
        put(self, "stop_token_ids", stop_ids)
        check.flag("ignore_eos", self.ignore_eos)
        self._check_constraint()
        check.integer("n", self.n, 1, MAX_CHOICES)
        self._check_candidates()
        self._check_beams()
        put(self, "speculation", check.member("speculation", self.speculation, Speculation))
        threshold = check.number("accept_threshold", self.accept_threshold, 0.0, 1.0)
        if threshold == 1:
            raise InvalidRequest("accept_threshold", threshold, "a number from 0 to below 1")
        put(self, "accept_threshold", threshold)

    def _check_candidates(self) -> None:
        if self.best_of is None:
            return
        check.integer("best_of", self.best_of, 1, MAX_CHOICES)
        if self.best_of < self.n:
            raise InvalidRequest("best_of", self.best_of, f"at least n, which is {self.n}")
        if self.best_of > self.n and self.prompt_logprobs is not None:
            allowed = "nothing beside a best_of over n, whose outputs are published whole"
            raise InvalidRequest("prompt_logprobs", self.prompt_logprobs, allowed)
        if self.best_of > self.n and self.temperature == 0:
            allowed = "n or none with temperature 0, which makes all candidates equal"
            raise InvalidRequest("best_of", self.best_of, allowed)

    def _check_beams(self) -> None:
        check.integer("beam_width", self.beam_width, 1, MAX_CHOICES)
        penalty = check.number("length_penalty", self.length_penalty, -10.0, 10.0)
        object.__setattr__(self, "length_penalty", penalty)
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise InvalidRequest("early_stopping", self.early_stopping, "true, false or never")
        if self.beam_width == 1:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    allowed = f"{default} without beam search; it needs a beam_width of 2 or more"
                    raise InvalidRequest(name, getattr(self, name), allowed)
            return
        if self.n > self.beam_width:
            allowed = f"at most beam_width, which is {self.beam_width}"
            raise InvalidRequest("n", self.n, allowed)
        if self.temperature not in (0.0, 1.0):
            allowed = "0 or 1 with beam search, which does not sample"
            raise InvalidRequest("temperature", self.temperature, allowed)
        for name, neutral in _NOT_WITH_BEAMS:
            if getattr(self, name) != neutral:
                allowed = "nothing beside beam_width: beam search goes without it"
                raise InvalidRequest(name, getattr(self, name), allowed)

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated at the same time to give the ``n`` choices."""
        return max(self.n, self.best_of or 1, self.beam_width)

    def _check_constraint(self) -> None:
        put = object.__setattr__
        if self.json_schema is not None:
            put(self, "json_schema", constraints.json_schema(self.json_schema))
        if self.regex is not None:
            constraints.regex(self.regex)
        if self.grammar is not None:
            constraints.grammar(self.grammar)
        if self.choice != ():
            put(self, "choice", constraints.choices(self.choice))
        if self.constraint is not None and self.ignore_eos:
            allowed = f"false: where the text that {self.constraint} asks for ends, nothing follows"
            raise InvalidRequest("ignore_eos", self.ignore_eos, allowed)

    @property
    def constraint(self) -> str | None:
        """The field that says what form the output has, None if none does."""
        if not (self.json_schema or self.regex or self.grammar or self.choice):
            return None
        given = {name: getattr(self, name) for name in constraints.CONSTRAINTS}
        return constraints.exclusive(given)

    def check_prompt(self, num_tokens: int) -> None:
        """Whether the report of a prompt of so many tokens is within its bound.

        Raises:
            InvalidRequest: it is not.
        """
        width = self.prompt_logprobs
        if width is not None and num_tokens * (width + 1) > MAX_PROMPT_FIGURES:
            allowed = (
                f"less, or a shorter prompt: {num_tokens} tokens of {width + 1} figures are over "
                f"{MAX_PROMPT_FIGURES}"
            )
            raise InvalidRequest("prompt_logprobs", width, allowed)

    def ending_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The token ids that end the output, given those that end a text of the model."""
        ids = frozenset() if self.ignore_eos else eos_token_ids
        return ids.union(self.stop_token_ids) if self.stop_token_ids else ids


def _biases(value: object) -> dict[int, float] | None:
    """Token ids and biases by ascending id, so that equal maps have equal packed forms."""
    allowed = f"a map of at most {MAX_BIASES} token ids to numbers from -100 to 100"
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise InvalidRequest("logit_bias", value, allowed)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        where = f"logit_bias[{key}]"
        decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = check.integer(where, int(key) if decimal else key, 0, 2**31 - 1)
        if token_id in biases:
            raise InvalidRequest(where, key, "each token id once")
        biases[token_id] = check.number(where, bias, -100.0, 100.0)
    return dict(sorted(biases.items())) or None
