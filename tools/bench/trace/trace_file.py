"""Reads a trace: requests with lengths and arrivals, as the peers' benchmarks write them.

A trace is one JSON object. Its ``requests`` are objects with ``prompt`` (token ids), ``output_len``
(exact, past EOS) and ``arrival_unit``. This is the arrival in mean gaps between two requests, so
one trace serves every rate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol.sampling_options import SamplingOptions

__all__ = ["TraceRequest", "read_trace_file"]

_MAX_BYTES = 1 << 28
_MAX_PROMPT = 1 << 18
_MAX_OUTPUT = 1 << 17


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        prompt_ids: token ids of the prompt.
        output_len: output tokens, generated exactly.
        arrival_units: arrival in units of the mean gap between two requests.
        temperature: of sampling; 0: greedy.
        top_p: of sampling.
    """

    prompt_ids: tuple[int, ...]
    output_len: int
    arrival_units: float
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sampling(self) -> SamplingOptions:
        """Exactly ``output_len`` tokens, past EOS."""
        return SamplingOptions(
            max_tokens=self.output_len,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=True,
        )

    def arrival_s(self, rate: float | None) -> float:
        """Arrival in seconds at ``rate`` requests per second; 0 without a rate: all at once."""
        return self.arrival_units / rate if rate else 0.0


def read_trace_file(path: Path, limit: int | None = None) -> Sequence[TraceRequest]:
    """Read the first ``limit`` requests of a trace, or all of them.

    Raises:
        ConfigurationError: the file cannot be read, is larger than 256 MiB, or is no trace.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigurationError(f"trace {path} is larger than {_MAX_BYTES >> 20} MiB")
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"trace {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"trace {path} is not JSON: {error}") from None
    requests = body.get("requests") if isinstance(body, dict) else None
    if not isinstance(requests, list) or not requests:
        raise ConfigurationError(f"trace {path} needs a list 'requests' with at least one request")
    return [_request(path, index, value) for index, value in enumerate(requests[:limit])]


def _request(path: Path, index: int, value: Any) -> TraceRequest:
    def wrong(name: str, allowed: str) -> ConfigurationError:
        return ConfigurationError(f"trace {path}: requests[{index}].{name} must be {allowed}")

    if not isinstance(value, dict):
        raise ConfigurationError(f"trace {path}: requests[{index}] must be an object")
    prompt, output, arrival = (value.get(k) for k in ("prompt", "output_len", "arrival_unit"))
    if not isinstance(prompt, list) or not 1 <= len(prompt) <= _MAX_PROMPT:
        raise wrong("prompt", f"a list of 1 to {_MAX_PROMPT} token ids")
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        raise wrong("prompt", "a list of token ids, integers from 0")
    if type(output) is not int or not 1 <= output <= _MAX_OUTPUT:
        raise wrong("output_len", f"an integer from 1 to {_MAX_OUTPUT}")
    if not isinstance(arrival, int | float) or not 0 <= arrival < 1e9:
        raise wrong("arrival_unit", "a number from 0")
    return TraceRequest(tuple(prompt), output, float(arrival))
