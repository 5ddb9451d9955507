"""Requests to measure with: the same for every side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions

__all__ = ["Item", "Trace", "mixed_trace", "requests_of", "uniform_trace"]


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt, and how many tokens it gets exactly."""

    prompt_ids: tuple[int, ...]
    max_tokens: int


Trace = Sequence[Item]


def uniform_trace(
    rng: random.Random, vocab_size: int, *, count: int, prompt: int, tokens: int
) -> Trace:
    """Requests of one shape."""
    return [Item(_ids(rng, vocab_size, prompt), tokens) for _ in range(count)]


def mixed_trace(rng: random.Random, vocab_size: int, *, count: int, tokens: int) -> Trace:
    """Requests of many lengths: prompts of 8 to 48 tokens, outputs of ``tokens / 8`` to ``tokens``.

    Real ones differ more; transformers' static batches would suffer more from them.
    """
    shapes = [(rng.randint(8, 48), rng.randint(max(1, tokens // 8), tokens)) for _ in range(count)]
    return [Item(_ids(rng, vocab_size, prompt), output) for prompt, output in shapes]


def _ids(rng: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, vocab_size) for _ in range(count))


def requests_of(trace: Trace, prefix: str) -> list[Request]:
    """The trace as requests, greedy and past EOS, with ids ``prefix.0`` and so on."""
    return [
        Request(
            id=f"{prefix}.{index}",
            prompt=item.prompt_ids,
            options=SamplingOptions(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True),
        )
        for index, item in enumerate(trace)
    ]
