"""How tokens are chosen and when a request stops: the part of a request the sampler reads."""

from __future__ import annotations

from dataclasses import dataclass

from . import fields as check

__all__ = ["SamplingOptions"]

MAX_TOKENS = 1 << 17
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64


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
        seed: 0 to 2**63 - 1; None derives it from the request id, so that a request that is
            continued by another worker draws the same random numbers.
        stop: up to 16 strings; output text ends before the first that appears.
        stop_token_ids: up to 64 ids that end the output like EOS does.
        ignore_eos: go on past the model's end-of-text token.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        check.integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        put(self, "temperature", check.number("temperature", self.temperature, 0.0, 10.0))
        check.integer("top_k", self.top_k, 0, 2**31 - 1)
        put(self, "top_p", check.number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put(self, "min_p", check.number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            check.integer("seed", self.seed, 0, 2**63 - 1)
        put(self, "stop", check.strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES))
        stop_ids = check.token_ids(
            "stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS, empty_ok=True
        )
        put(self, "stop_token_ids", stop_ids)
        check.flag("ignore_eos", self.ignore_eos)
