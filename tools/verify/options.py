"""The options of ``penstock verify``, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from penstock.shared.errors import ConfigurationError

from ..measurement import MeasurementOptions, Range

__all__ = ["VerifyOptions"]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(MeasurementOptions):
    """What to verify and on what."""

    model: Annotated[
        str, Option(help="Directory of the checkpoint, or 'demo' for the model shipped here.")
    ]
    prompts_file: Annotated[
        Path | None,
        Option(
            "--prompts",
            help="Prompts, one per line of UTF-8 text; in a .jsonl file each line is a string, a "
            "list of token ids or a list of chat messages. Without it they are drawn by --seed.",
            show_default=False,
        ),
    ] = None
    text_file: Annotated[
        Path | None,
        Option(
            "--text",
            help="UTF-8 text whose perplexity is compared. Without it, an excerpt of Python's own "
            "reference.",
            show_default=False,
        ),
    ] = None
    prompts_count: Annotated[
        int | None,
        Option(
            help="Prompts to draw where no --prompts are given; 8 by default.", show_default=False
        ),
        Range(1),
    ] = None
    max_tokens: Annotated[int, Option(help="Output tokens of each prompt."), Range(1)] = 24
    context: Annotated[
        int,
        Option(help="Tokens of a window of the text; windows overlap by half."),
        Range(2),
    ] = 512
    seed: Annotated[int, Option(help="Of prompts, chunkings and batch mixes."), Range(0)] = 0
    full: Annotated[
        Path | None,
        Option(
            help="Directory of the full checkpoint that --model is the quantised form of: reports "
            "its perplexity, and how often both choose the same next token.",
            show_default=False,
        ),
    ] = None
    quantization: Annotated[
        Literal["none", "auto", "int8", "int4", "nf4", "fp8"],
        Option(
            help="As the setting model.quantization: what a format rounds is compared with "
            "transformers over the rounded weights, and both with the full model as by --full."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["int8", "fp8"] | None,
        Option(
            help="int8 or fp8, as the setting model.kv_cache_dtype: loads the model once more with "
            "its KV cache in 8 bits, and reports the perplexity, and how often the next token of "
            "the text is the same.",
            show_default=False,
        ),
    ] = None
    dtype: Annotated[
        str, Option(help="float32, float16, bfloat16, or auto as the worker chooses.")
    ] = "float32"
    device: Annotated[str, Option(help="cpu, cuda, cuda:1, ... or auto.")] = "auto"
    threads: Annotated[
        int | None,
        Option(help="CPU threads; by default one for a small model, else torch's choice."),
        Range(1),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts_file is not None and self.prompts_count is not None:
            raise ConfigurationError(
                "--prompts-count: the prompts come from --prompts; leave one of the two out"
            )
        if self.full is not None and self.quantization not in ("auto", "none"):
            raise ConfigurationError(
                f"--full: the full model is --model itself, which --quantization rounds to "
                f"{self.quantization}; leave one of the two out"
            )
