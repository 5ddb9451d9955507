"""The requests of a run: drawn from distributions, or read from a trace file.

Requests are an iterator in the order of arrival, so a million of them take no more memory than
those under way.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.shared.errors import ConfigurationError, InvalidRequest
from penstock.shared.protocol.request import check_tenant
from penstock.shared.protocol.states import Lane

__all__ = ["MOST_TOKENS", "Generator", "Lengths", "SimRequest", "read_trace", "write_trace"]


MOST_TOKENS = 1 << 17
"""Longest prompt and longest output: the protocol's bound on ``max_tokens``."""


@dataclass(slots=True)
class SimRequest:
    """One request of a simulation. Immutable.

    Attributes:
        id: unique in the run.
        arrival: acceptance, in seconds from the start.
        prompt_len: tokens of the prompt.
        output_len: tokens after which the model ends the text.
        max_tokens: the client's limit, and the queue's estimate of the output.
        lane: urgency.
        tenant: unit of fair shares.
        deadline: when its answer should be complete, in seconds from the start; None: any time. A
            later end counts as late; the request still completes.
        rank: ``lane.rank``, cached.
    """

    id: str
    arrival: float
    prompt_len: int
    output_len: int
    max_tokens: int
    lane: Lane
    tenant: str
    deadline: float | None = None
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.lane.rank

    @property
    def cost_estimate(self) -> int:
        """Tokens charged at the claim, as ``Request.cost_estimate`` for a prompt of ids."""
        return self.prompt_len + self.max_tokens

    @property
    def tokens(self) -> int:
        """Tokens it uses."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, cut to ``[1, most]``.

    Written ``const:N``, ``uniform:LOW:HIGH``, ``exp:MEAN`` or ``lognormal:MEAN:SIGMA``, where SIGMA
    is the standard deviation of the logarithm (1 is a heavy tail). An optional ``:max=N`` cuts it.

    Raises:
        ConfigurationError: the text is none of these.
    """

    text: str

    def __post_init__(self) -> None:
        self.sampler()

    @property
    def most(self) -> int:
        """The largest possible draw."""
        return self._parse()[2]

    def sampler(self) -> Callable[[random.Random], int]:
        """Return a function that draws a length."""
        kind, values, most = self._parse()
        if kind == "const":
            return lambda _: min(most, int(values[0]))
        if kind == "uniform":
            low, high = int(values[0]), int(values[1])
            return lambda rng: min(most, rng.randint(low, high))
        if kind == "exp":
            rate = 1 / values[0]
            return lambda rng: max(1, min(most, round(rng.expovariate(rate))))
        sigma = values[1]
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        factor = values[0] / math.exp(sigma * sigma / 2)
        return lambda rng: max(1, min(most, round(factor * rng.lognormvariate(0.0, sigma))))

    def _parse(self) -> tuple[str, list[float], int]:
        counts = {"const": 1, "uniform": 2, "exp": 1, "lognormal": 2}
        kind, *parts = self.text.split(":")
        most = MOST_TOKENS
        try:
            if parts and parts[-1].startswith("max="):
                most = int(parts.pop().removeprefix("max="))
            elif kind == "const":
                most = int(parts[0])
            elif kind == "uniform":
                most = int(parts[1])
            values = [float(part) for part in parts]
            if not all(map(math.isfinite, values)):
                raise ValueError
        except (ValueError, IndexError):
            raise self._error() from None
        if len(values) != counts.get(kind) or not 0 < most <= MOST_TOKENS:
            raise self._error()
        if (
            min(values) <= 0
            or (kind != "lognormal" and min(values) < 1)
            or max(values) > MOST_TOKENS
        ):
            raise self._error()
        if kind == "uniform" and values[0] > values[1]:
            raise self._error()
        return kind, values, most

    def _error(self) -> ConfigurationError:
        return ConfigurationError(
            f"lengths are {self.text!r}; allowed: const:N, uniform:LOW:HIGH, exp:MEAN or "
            "lognormal:MEAN:SIGMA, each with an optional :max=N; from 1 to 131072 tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Draws requests; the same seed draws the same requests.

    Attributes:
        count: number of requests.
        rate: arrivals per second, all tenants together.
        burstiness: coefficient of variation of the gamma-distributed gaps: 1 is Poisson, 0 a clock,
            above 1 bursts.
        prompt: lengths of prompts.
        output: lengths of outputs; ``max_tokens`` is the longest, as clients usually send.
        lanes: weight of each lane in the mix.
        tenants: weight of each tenant in the mix.
        deadlines: least and most seconds from a request's arrival to its deadline; None: no
            deadlines.
        seed: of everything drawn.

    Raises:
        ConfigurationError: a number is out of range.
    """

    count: int
    rate: float
    burstiness: float = 1.0
    prompt: Lengths
    output: Lengths
    lanes: Mapping[Lane, float]
    tenants: Mapping[str, float]
    deadlines: tuple[float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigurationError(f"requests is {self.count}; allowed: 1 or more")
        if not 0 < self.rate < math.inf:
            raise ConfigurationError(
                f"rate is {self.rate}; allowed: more than 0 a second, and finite"
            )
        if not 0 <= self.burstiness <= 100:
            raise ConfigurationError(f"burstiness is {self.burstiness}; allowed: 0 to 100")
        for name, mix in (("lanes", self.lanes), ("tenants", self.tenants)):
            weights = mix.values()
            if not mix or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
                shown = ",".join(f"{key}={weight:g}" for key, weight in mix.items())
                raise ConfigurationError(
                    f"the mix of {name} is {shown!r}; allowed: finite weights from 0 on, one of "
                    "them above 0"
                )

        low, high = self.deadlines or (0.0, 0.0)
        if not 0 <= low <= high <= 1e6:
            raise ConfigurationError(
                f"deadlines are {low}:{high}; allowed: seconds, LEAST:MOST, from 0 to 1000000"
            )

    def __iter__(self) -> Iterator[SimRequest]:
        rng = random.Random(self.seed)
        # Drawn separately, so the rest is the same with deadlines and without.
        deadlines = random.Random(f"deadlines {self.seed}")
        prompt, output = self.prompt.sampler(), self.output.sampler()
        lanes, lane_weights = list(self.lanes), list(self.lanes.values())
        tenants, tenant_weights = list(self.tenants), list(self.tenants.values())
        most = self.output.most if self.output.most < MOST_TOKENS else None
        now, span = 0.0, self.deadlines
        for index in range(self.count):
            now += self._gap(rng)
            length = output(rng)
            yield SimRequest(
                id=f"r{index}",
                arrival=now,
                prompt_len=prompt(rng),
                output_len=length,
                max_tokens=length if most is None else most,
                lane=rng.choices(lanes, lane_weights)[0],
                tenant=rng.choices(tenants, tenant_weights)[0],
                deadline=None if span is None else now + deadlines.uniform(*span),
            )

    def _gap(self, rng: random.Random) -> float:
        if self.burstiness == 0:
            return 1 / self.rate
        if self.burstiness == 1:
            return rng.expovariate(self.rate)
        shape = self.burstiness**-2
        return rng.gammavariate(shape, 1 / (shape * self.rate))


def read_trace(path: Path) -> Iterator[SimRequest]:
    """Read a trace: JSON lines with at least ``arrival``, ``prompt_len``, ``output_len``.

    Optional: ``id``, ``max_tokens`` (else ``output_len``), ``lane`` (else normal), ``tenant``
    (else default) and ``deadline`` (else none). Lines must be in the order of arrival.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not a request (with its number).
    """
    try:
        with path.open(encoding="utf-8") as lines:
            last, empty = 0.0, True
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                request = _parse_line(line, f"{path}:{number}", f"r{number}")
                if request.arrival < last:
                    raise ConfigurationError(
                        f"{path}:{number}: arrival {request.arrival} is before the line above "
                        f"({last}): sort the trace by arrival"
                    )
                last, empty = request.arrival, False
                yield request
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"trace {path} cannot be read: {error}") from error
    if empty:
        raise ConfigurationError(f"trace {path} holds no request: one JSON object per line")


def write_trace(requests: Iterable[SimRequest], path: Path) -> None:
    """Write requests as JSON lines, one per request, as :func:`read_trace` reads them.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as lines:
            for request in requests:
                values = {name: getattr(request, name) for name in _FIELDS}
                lines.write(json.dumps(values) + "\n")
    except OSError as error:
        raise ConfigurationError(f"trace {path} cannot be written: {error}") from error


_FIELDS = ("id", "arrival", "prompt_len", "output_len", "max_tokens", "lane", "tenant", "deadline")
_COUNTS = ("prompt_len", "output_len", "max_tokens")


def _parse_line(line: str, where: str, default_id: str) -> SimRequest:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{where}: not a JSON object")
    unknown = set(values) - set(_FIELDS)
    missing = {"arrival", "prompt_len", "output_len"} - set(values)
    if missing:
        raise ConfigurationError(f"{where}: {_listed(missing)} missing: each request needs its own")
    if unknown:
        known = ", ".join(_FIELDS)
        raise ConfigurationError(f"{where}: {_listed(unknown)} unknown; known: {known}")
    values.setdefault("max_tokens", values["output_len"])
    for name in _COUNTS:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
            raise ConfigurationError(f"{where}: {name} is {value!r}; allowed: 1 to {MOST_TOKENS}")
    deadline = values.get("deadline")
    arrival = _seconds(where, "arrival", values["arrival"])
    try:
        return SimRequest(
            id=str(values.get("id", default_id)),
            arrival=arrival,
            prompt_len=values["prompt_len"],
            output_len=values["output_len"],
            max_tokens=values["max_tokens"],
            lane=_lane(where, values.get("lane", Lane.NORMAL)),
            tenant=check_tenant(values.get("tenant", "default")),
            deadline=None if deadline is None else _seconds(where, "deadline", deadline),
        )
    except (ValueError, InvalidRequest) as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names)) + (" is" if len(names) == 1 else " are")


def _lane(where: str, value: Any) -> Lane:
    if value not in list(Lane):
        raise ConfigurationError(f"{where}: lane is {value!r}; allowed: {', '.join(Lane)}")
    return Lane(value)


def _seconds(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigurationError(f"{where}: {name} is {value!r}; allowed: seconds from 0 on")
    return float(value)
