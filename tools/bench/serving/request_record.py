"""When a request's tokens came, and the figures of many: named as vLLM's ``bench serve`` does."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.shared.errors import ConfigurationError

from ...rounds import percentile

__all__ = ["RequestRecord", "read_goals", "summarise"]

_PERCENTILES = (90, 99)
_GOALS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds of one clock.

    Attributes:
        sent_at: when it was sent.
        chunks: when tokens came, and how many together.
        input_tokens: of its prompt, as its end says.
        error: why it did not complete; empty if it did.
    """

    sent_at: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    input_tokens: int = 0
    error: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.chunks)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0][0] - self.sent_at

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.chunks[-1][0] - self.sent_at

    @property
    def tpot(self) -> float:
        """Seconds an output token after the first; 0 if there is only one."""
        return (self.e2el - self.ttft) / max(1, self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between two events with tokens."""
        times = [at for at, _ in self.chunks]
        return [after - before for before, after in itertools.pairwise(times)]


def read_goals(text: str | None) -> dict[str, float]:
    """Service levels such as ``ttft:200,e2el:3000``, in milliseconds.

    Raises:
        ConfigurationError: they are written otherwise.
    """
    goals = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", part.strip())
        if match is None:
            allowed = f"{', '.join(_GOALS)}, each with milliseconds, as in ttft:200,e2el:3000"
            raise ConfigurationError(f"--goodput: got {part!r}; allowed: {allowed}")
        goals[match[1]] = float(match[2])
    return goals


def summarise(
    records: Sequence[RequestRecord], duration_s: float, goals: Mapping[str, float]
) -> dict[str, float]:
    """The figures of a load.

    Args:
        records: of all its requests.
        duration_s: from the first request to the last token.
        goals: service levels in milliseconds; a request that meets all of them is good.
    """
    done = [record for record in records if not record.error]
    output = sum(record.output_tokens for record in done)
    total = output + sum(record.input_tokens for record in done)
    figures: dict[str, float] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration": duration_s,
        "total_input_tokens": total - output,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": total / duration_s,
    }
    if goals:
        good = sum(
            all(1e3 * getattr(record, name) <= limit for name, limit in goals.items())
            for record in done
        )
        figures["request_goodput"] = good / duration_s
    for name, values in (
        ("ttft", [record.ttft for record in done]),
        ("tpot", [record.tpot for record in done if record.output_tokens > 1]),
        ("itl", [gap for record in done for gap in record.itl]),
        ("e2el", [record.e2el for record in done]),
    ):
        if values:
            figures |= _distribution(name, [1e3 * value for value in values])
    return figures


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        **{f"p{percent}_{name}_ms": percentile(values, percent) for percent in _PERCENTILES},
    }
