"""The options of ``penstock profile``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from ..measurement import MeasurementOptions, ModelFlag, Range, ThreadsFlag

__all__ = ["ProfileOptions"]


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(MeasurementOptions):
    """Options of ``penstock profile``."""

    model: ModelFlag = "demo"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Option(help="float32, bfloat16 or auto.")
    ] = "auto"
    quantization: Annotated[
        Literal["none", "auto", "int8", "int4", "nf4", "fp8"],
        Option(help="As the setting model.quantization."),
    ] = "auto"
    sequences: Annotated[int, Option(help="Sequences that decode together."), Range(1, 1024)] = 16
    prompt: Annotated[int, Option(help="Prompt tokens of each."), Range(1)] = 64
    tokens: Annotated[int, Option(help="Output tokens of each."), Range(2)] = 64
    threads: ThreadsFlag = None
    native: Annotated[Literal["auto", "on", "off"], Option(help="As the setting model.native.")] = (
        "auto"
    )
    trace: Annotated[
        Path | None,
        Option(help="Write the steps as a Chrome trace (chrome://tracing, Perfetto) to this file."),
    ] = None
