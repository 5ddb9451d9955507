"""What a load asks, and when: prompts, output lengths and arrivals, made from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..options import ServeOptions
from ..trace.trace_file import read_trace_file

__all__ = ["LoadRequest", "plan_load"]

_WORDS = tuple(
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or had
    an they which one you were all her she there would their we him been has when who will no more
    if out so up said what its about than into them can only other time new some could these
    """.split()  # noqa: SIM905 -- prose reads better than a list of sixty strings
)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load.

    Attributes:
        prompt: text, or token ids of a trace.
        output_tokens: output tokens, generated exactly: past the end of the text.
        arrival_s: when it is sent, in seconds from the start.
    """

    prompt: str | list[int]
    output_tokens: int
    arrival_s: float


def plan_load(options: ServeOptions) -> list[LoadRequest]:
    """The requests of a load, in order of arrival; the same for the same options.

    Gaps between arrivals follow a gamma distribution with the shape ``burstiness``: 1 is a Poisson
    process, less is burstier, more is more even.

    Raises:
        ConfigurationError: the trace cannot be read.
    """
    rng = random.Random(options.seed)
    if options.trace is not None:
        trace = read_trace_file(options.trace, options.num_prompts)
        return [
            LoadRequest(list(r.prompt_ids), r.output_len, r.arrival_s(options.request_rate))
            for r in trace
        ]
    requests, now = [], 0.0
    for _ in range(options.num_prompts):
        prompt = " ".join(rng.choices(_WORDS, k=options.words))
        requests.append(LoadRequest(prompt, options.output_tokens, now))
        if options.request_rate is not None:
            scale = 1 / (options.request_rate * options.burstiness)
            now += rng.gammavariate(options.burstiness, scale)
    return requests
