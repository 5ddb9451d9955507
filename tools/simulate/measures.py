"""The measures of a run. Their memory does not grow with the number of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol.states import Lane

from .arrivals import SimRequest

__all__ = ["Histogram", "LaneFigures", "Recorder", "ServiceLevel"]

_LEAST_S = 1e-6
_RATIO = 1.01
_PER_E = 1 / math.log(_RATIO)
_BINS = int(math.log(1e12) * _PER_E) + 1


class Histogram:
    """Durations in bins 1 % wide: quantiles are accurate to half of that, the mean is exact.

    Durations below a microsecond count as one.
    """

    __slots__ = ("_bins", "_greatest", "_least", "_sum", "count")

    def __init__(self) -> None:
        self._bins = [0] * _BINS
        self._sum = 0.0
        self._least, self._greatest = math.inf, 0.0
        self.count = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add the same duration ``count`` times."""
        index = int(math.log(seconds / _LEAST_S) * _PER_E) if seconds > _LEAST_S else 0
        self._bins[min(index, _BINS - 1)] += count
        self._sum += seconds * count
        self.count += count
        if seconds < self._least:
            self._least = seconds
        if seconds > self._greatest:
            self._greatest = seconds

    def merge(self, other: Histogram) -> None:
        """Add all durations of another one."""
        self._bins = [a + b for a, b in zip(self._bins, other._bins, strict=True)]
        self._sum += other._sum
        self._least = min(self._least, other._least)
        self._greatest = max(self._greatest, other._greatest)
        self.count += other.count

    @property
    def mean(self) -> float:
        """Mean duration; NaN if nothing was added."""
        return self._sum / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The duration that this share does not exceed; Mean duration; NaN if nothing was added."""
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for index, count in enumerate(self._bins):
            seen += count
            if seen >= rank and count:
                middle = _LEAST_S * math.exp((index + 0.5) / _PER_E)
                return min(max(middle, self._least), self._greatest)
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """The limits of a good answer.

    Attributes:
        ttft_s: limit of the time from acceptance to first token.
        itl_s: limit of the mean time between its further tokens.

    Raises:
        ConfigurationError: one of them is not above 0.
    """

    ttft_s: float
    itl_s: float

    def __post_init__(self) -> None:
        for name, value in (("slo_ttft", self.ttft_s), ("slo_itl", self.itl_s)):
            if not value > 0:
                raise ConfigurationError(f"{name} is {value} s; allowed: above 0")


class LaneFigures:
    """Figures of one lane's requests.

    Attributes:
        ttft: acceptance to first token.
        itl: token to token.
        e2e: acceptance to end.
        ended, good: ended requests, and those of them within the service level.
        refused: ended requests that could not be served.
        late: ended requests that were served after their deadline.
        output_tokens: of all ended requests.
    """

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.itl = Histogram()
        self.e2e = Histogram()
        self.ended = 0
        self.good = 0
        self.refused = 0
        self.late = 0
        self.output_tokens = 0

    def merge(self, other: LaneFigures) -> None:
        """Add another lane's requests."""
        self.ttft.merge(other.ttft)
        self.itl.merge(other.itl)
        self.e2e.merge(other.e2e)
        self.ended += other.ended
        self.good += other.good
        self.refused += other.refused
        self.late += other.late
        self.output_tokens += other.output_tokens


class Recorder:
    """Records the events of requests.

    Args:
        level: limits of a good answer.
        publish_s: from the end of a step until its tokens are readable.
    """

    def __init__(self, level: ServiceLevel, publish_s: float) -> None:
        self._level = level
        self._publish_s = publish_s
        self.lanes = {lane: LaneFigures() for lane in Lane}
        self.gaps = [self.lanes[lane].itl for lane in sorted(Lane, key=lambda lane: lane.rank)]
        self.last_end = 0.0

    def all_lanes(self) -> LaneFigures:
        """The figures of all requests together."""
        total = LaneFigures()
        for figures in self.lanes.values():
            total.merge(figures)
        return total

    def first_token(self, request: SimRequest, now: float) -> None:
        """Record the first token."""
        self.lanes[request.lane].ttft.add(now + self._publish_s - request.arrival)

    def end(self, request: SimRequest, first: float, now: float) -> None:
        """Record the last token; the first one came at ``first``."""
        figures, level = self.lanes[request.lane], self._level
        figures.e2e.add(now + self._publish_s - request.arrival)
        figures.ended += 1
        figures.output_tokens += request.output_len
        deadline = request.deadline
        figures.late += deadline is not None and now + self._publish_s > deadline
        gaps = request.output_len - 1
        in_time = first + self._publish_s - request.arrival <= level.ttft_s
        figures.good += in_time and (gaps == 0 or (now - first) / gaps <= level.itl_s)
        self.last_end = max(self.last_end, now + self._publish_s)

    def refuse(self, request: SimRequest, now: float) -> None:
        """Record a request that cannot be served: too long, or larger than the KV pool."""
        self.lanes[request.lane].ended += 1
        self.lanes[request.lane].refused += 1
        self.last_end = max(self.last_end, now + self._publish_s)
