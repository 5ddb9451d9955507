"""The options of ``penstock bench batches``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from ...measurement import MeasurementOptions, ModelFlag, Range, ThreadsFlag

__all__ = ["BatchesOptions"]


@dataclass(frozen=True, kw_only=True)
class BatchesOptions(MeasurementOptions):
    """Options of ``bench batches``."""

    model: ModelFlag = "demo"
    lines: Annotated[int, Option(help="Lines of the batch."), Range(1, 50_000)] = 10_000
    words: Annotated[int, Option(help="Words of a line's message, and of a chat's."), Range(1)] = 8
    tokens: Annotated[int, Option(help="Output tokens of a line."), Range(1)] = 8
    chat_rate: Annotated[
        float, Option(help="Chat requests per second."), Range(0, 1000, above=True)
    ] = 2.0
    chat_tokens: Annotated[int, Option(help="Output tokens of a chat request."), Range(1)] = 16
    chat_seconds: Annotated[
        int, Option(help="How long there is chat without a batch, in seconds."), Range(1)
    ] = 60
    threads: ThreadsFlag = None
