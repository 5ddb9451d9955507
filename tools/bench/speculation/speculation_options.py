"""The options of ``bench spec``, importable without what the measurement needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from penstock.shared.errors import ConfigurationError

from ...measurement import MeasurementOptions, ModelFlag, Range, RoundsFlag, ThreadsFlag
from ..options import DtypeFlag

__all__ = ["SpeculationOptions"]


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(MeasurementOptions):
    """Options of ``bench spec``."""

    model: ModelFlag = "demo"
    draft: Annotated[
        str, Option(help="Directory of its draft model; 'auto' for that of the demo model.")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="auto, cpu or cuda.")] = "cpu"
    batches: Annotated[
        Sequence[int], Option(help="Sequences that run together, with commas."), Range(1)
    ] = (1, 2, 4, 8, 16, 32)
    tokens: Annotated[int, Option(help="Output tokens of each in a round."), Range(1)] = 96
    dtype: DtypeFlag = "auto"
    widen: Annotated[
        int,
        Option(
            help="Widen the MLPs so many times with neurons that do nothing: the same text from a "
            "larger model.",
        ),
        Range(1),
    ] = 1
    length: Annotated[int, Option(help="Drafts where they are not chosen."), Range(1)] = 4
    rounds: RoundsFlag = 7
    threads: ThreadsFlag = None
    clock: Annotated[
        bool, Option("--clock", help="Time by the clock, and not CPU time of the process.")
    ] = False
    tasks: Annotated[
        bool, Option(help="Also an edit, and a text that cannot be guessed.", show_default=True)
    ] = True
    shape: Annotated[
        Literal["7b", "small"] | None,
        Option(
            help="7b or small: random weights of that shape instead of a model; synthetic.",
            show_default=False,
        ),
    ] = None
    acceptance: Annotated[
        float, Option(help="Chance that a draft is right, with --shape."), Range(0, 1)
    ] = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device != "cpu" and not self.clock:
            raise ConfigurationError(
                f"--device {self.device}: a GPU's time is not the process's; add --clock"
            )
        if self.shape is not None and self.dtype != "auto":
            raise ConfigurationError(
                f"--dtype {self.dtype}: weights of --shape {self.shape} are float32 on a CPU and "
                "bfloat16 on a GPU; leave one of the two out"
            )
        if self.shape is not None and self.widen > 1:
            raise ConfigurationError(
                f"--widen {self.widen}: a model of --shape {self.shape} has the width of that "
                "shape; leave one of the two out"
            )
