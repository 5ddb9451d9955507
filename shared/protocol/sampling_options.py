"""How tokens are chosen and when a request stops: the part of a request the sampler reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidRequest
from .fields.collection_types import Biases, JsonSchema, Texts, TokenIds
from .fields.field_types import Flag, FlagOrWord, Integer, Number, OptionTable, Text, Word, option
from .states import Speculation

__all__ = ["SAMPLING_OPTIONS", "SamplingOptions"]

MAX_TOKENS = 1 << 17
MAX_LISTED_TOKENS = 4096
MAX_LOGPROBS = 20
MAX_PROMPT_FIGURES = 1 << 16
MAX_CHOICES = 64
MAX_GRAMMAR_BYTES = 1 << 16

CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
"""The options that constrain the form of the output; a request has at most one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when a request stops.

    Each option is declared once, here: validation, the ingress, the flags of ``penstock submit``
    and docs/options.md follow from it. The order is that of the packed form.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range, or two contradict each other.
    """

    max_tokens: int = option(256, Integer(1, MAX_TOKENS), "Most output tokens.")
    temperature: float = option(
        1.0, Number(0, 10), "Divides the logits before sampling; 0 is greedy."
    )
    top_k: int = option(
        0, Integer(0, 2**31 - 1), "Keep the k most likely tokens; 0 keeps all.", beam_search=False
    )
    # Holtzman et al., 2019, "The Curious Case of Neural Text Degeneration".
    top_p: float = option(
        1.0,
        Number(0, 1, above_low=True),
        "Keep the smallest set of tokens with at least this probability.",
        beam_search=False,
    )
    # Nguyen et al., 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
    # Outputs".
    min_p: float = option(
        0.0,
        Number(0, 1),
        "Of what top_k and top_p left, keep tokens at least this many times as likely as the most "
        "likely one.",
        beam_search=False,
    )
    # Keskar et al., 2019, "CTRL".
    repetition_penalty: float = option(
        1.0,
        Number(0.1, 10),
        "For tokens of prompt and output, divides positive logits and multiplies the others; "
        "over 1 makes repetition less likely.",
    )
    presence_penalty: float = option(
        0.0, Number(-2, 2), "Subtracted from the logits of tokens that are in the output."
    )
    frequency_penalty: float = option(
        0.0, Number(-2, 2), "The same, times the number of times the token is in the output."
    )
    logit_bias: Mapping[int, float] | None = option(
        None, Biases(300, 100), "Added to the logits of these token ids.", unset="none", hash=False
    )
    allowed_token_ids: tuple[int, ...] = option(
        (), TokenIds(MAX_LISTED_TOKENS), "The only token ids that may be chosen; empty allows all."
    )
    banned_token_ids: tuple[int, ...] = option(
        (), TokenIds(MAX_LISTED_TOKENS), "Token ids that are never chosen."
    )
    min_tokens: int = option(
        0,
        Integer(0, MAX_TOKENS),
        "Until the output has this many tokens, no token id ends it; a stop text still does. At "
        "most max_tokens.",
    )
    logprobs: int | None = option(
        None,
        Integer(0, MAX_LOGPROBS),
        "Report the log-probability of each output token and of this many most likely ones, as the "
        "model gives them, before all other options.",
        unset="no report",
        beam_search=False,
    )
    prompt_logprobs: int | None = option(
        None,
        Integer(0, MAX_LOGPROBS),
        "Report the same for the prompt's tokens but the first, once, with the first output token. "
        f"This plus 1, times the prompt's tokens, is at most {MAX_PROMPT_FIGURES:,}.",
        unset="no report",
        beam_search=False,
    )
    # By default from the id: a continued request draws the same numbers on another worker.
    seed: int | None = option(
        None,
        Integer(0, 2**63 - 1),
        "Seed of the random numbers: the same seed and request give the same tokens.",
        unset="derived from the id",
    )
    stop: tuple[str, ...] = option(
        (), Texts(16, 256), "End the output before the first of these texts.", beam_search=False
    )
    stop_token_ids: tuple[int, ...] = option(
        (), TokenIds(64), "Token ids that end the output, like the model's end-of-text token."
    )
    ignore_eos: bool = option(False, Flag(), "Go on past the model's end-of-text token.")
    n: int = option(
        1, Integer(1, MAX_CHOICES), "Number of outputs; each draws its own random numbers."
    )
    best_of: int | None = option(
        None,
        Integer(1, MAX_CHOICES),
        "Generate this many candidates, at least n, and give the n with the highest mean "
        "log-probability, the best first.",
        unset="n",
        beam_search=False,
    )
    beam_width: int = option(
        1,
        Integer(1, MAX_CHOICES),
        "Over 1: search for the most likely output with this many beams, and give the n best, the "
        "best first.",
    )
    length_penalty: float = option(
        1.0,
        Number(-10, 10),
        "Of beam search: the sum of log-probabilities is divided by the length to this power; over "
        "0 favours longer outputs.",
    )
    # As transformers defines them.
    early_stopping: bool | str = option(
        False,
        FlagOrWord("never"),
        "When beam search stops, once it has beam_width finished outputs. True: at once. False: "
        "when no beam would beat the worst of them if it ended now. Never: when none still could "
        "at its longest.",
    )
    json_schema: str | None = option(
        None,
        JsonSchema(MAX_GRAMMAR_BYTES),
        "The output is a JSON value that this schema describes.",
        unset="none",
        beam_search=False,
    )
    regex: str | None = option(
        None,
        Text(1 << 13),
        "The output is a text that this regular expression matches as a whole.",
        unset="none",
        beam_search=False,
    )
    grammar: str | None = option(
        None,
        Text(MAX_GRAMMAR_BYTES),
        "The output is a text of this context-free grammar in Lark's notation.",
        unset="none",
        beam_search=False,
    )
    choice: tuple[str, ...] = option(
        (),
        Texts(1024, 1024, max_total_bytes=1 << 16, distinct=True),
        "The output is one of these texts.",
        beam_search=False,
    )
    speculation: Speculation = option(
        Speculation.AUTO,
        Word(Speculation),
        "Where drafts of coming tokens may come from, if the worker has it. It changes the speed, "
        "never the output.",
    )
    # "Typical acceptance" of Cai et al., 2024, "Medusa".
    accept_threshold: float = option(
        0.0,
        Number(0, 1, below_high=True),
        "Over 0 the output is no longer exactly the model's: drafts that the model finds about "
        "this likely are accepted, too. Without effect where nothing is random.",
    )

    def __post_init__(self) -> None:
        SAMPLING_OPTIONS.check(self)
        if self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, which is {self.max_tokens}"
            raise InvalidRequest("min_tokens", self.min_tokens, allowed)
        if self.allowed_token_ids and not set(self.allowed_token_ids).difference(
            self.banned_token_ids
        ):
            allowed = "at least one id that is not in banned_token_ids, too"
            raise InvalidRequest("allowed_token_ids", self.allowed_token_ids, allowed)
        self._check_constraint()
        self._check_candidates()
        self._check_beams()

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        given = [name for name in CONSTRAINTS if getattr(self, name)]
        if len(given) > 1:
            allowed = f"at most one of {', '.join(CONSTRAINTS)}; {given[0]} is given, too"
            raise InvalidRequest(given[1], getattr(self, given[1]), allowed)
        if self.ignore_eos:
            allowed = f"false: nothing follows where the text that {given[0]} asks for ends"
            raise InvalidRequest("ignore_eos", self.ignore_eos, allowed)

    def _check_candidates(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise InvalidRequest("best_of", self.best_of, f"at least n, which is {self.n}")
        if self.best_of > self.n and self.prompt_logprobs is not None:
            allowed = "nothing beside a best_of over n, whose outputs are published whole"
            raise InvalidRequest("prompt_logprobs", self.prompt_logprobs, allowed)
        if self.best_of > self.n and self.temperature == 0:
            allowed = "n or none with temperature 0, which makes all candidates equal"
            raise InvalidRequest("best_of", self.best_of, allowed)

    def _check_beams(self) -> None:
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
        for item in SAMPLING_OPTIONS.options:
            value = getattr(self, item.name)
            if not item.beam_search and value != item.default:
                raise InvalidRequest(item.name, value, "nothing beside beam_width")

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated at the same time for the ``n`` choices."""
        return max(self.n, self.best_of or 1, self.beam_width)

    @property
    def constraint(self) -> str | None:
        """The option that constrains the form of the output, None without one."""
        if not (self.json_schema or self.regex or self.grammar or self.choice):
            return None
        return next(name for name in CONSTRAINTS if getattr(self, name))

    def check_prompt(self, num_tokens: int) -> None:
        """Check that ``prompt_logprobs`` of a prompt of ``num_tokens`` tokens is within its bound.

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
        """Return the ids that end the output, given those that end a text of the model."""
        ids = frozenset() if self.ignore_eos else eos_token_ids
        return ids.union(self.stop_token_ids) if self.stop_token_ids else ids


SAMPLING_OPTIONS = OptionTable(SamplingOptions)
