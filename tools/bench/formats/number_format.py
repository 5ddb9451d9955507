"""The number formats to compare, by the options that name them; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.shared.errors import ConfigurationError

__all__ = ["FULL", "METHODS", "NumberFormat", "number_formats"]

FULL = "bfloat16"
"""The name of what all formats are compared with."""

METHODS = ("int8", "int4", "nf4", "fp8")
"""As the setting ``model.quantization`` has them."""


class NumberFormat(NamedTuple):
    """A model in one number format.

    Attributes:
        name: in figures.
        model: the checkpoint.
        quantization: as ``model.quantization`` has it; ``auto`` is the checkpoint's own.
    """

    name: str
    model: str
    quantization: str = "auto"


def number_formats(
    model: str, quantization: str | None, checkpoints: str | None
) -> tuple[NumberFormat, ...]:
    """A model in the formats of ``quantization``, and its quantised copies.

    Args:
        model: the full checkpoint.
        quantization: of :data:`METHODS`, with commas between.
        checkpoints: paths of copies, with commas between. The last part of each is its name.

    Raises:
        ConfigurationError: a format is not served, or two have the same name, :data:`FULL` among
            them.
    """
    methods, paths = (text.split(",") if text else [] for text in (quantization, checkpoints))
    for name in methods:
        if name not in METHODS:
            raise ConfigurationError(
                f"--quantization: got {name!r}; allowed, with commas: {', '.join(METHODS)}"
            )
    formats = (
        *(NumberFormat(name, model, name) for name in methods),
        *(NumberFormat(Path(path).name, path) for path in paths),
    )
    names = [FULL, *(each.name for each in formats)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"--checkpoints: the name {name!r} comes twice; allowed: paths whose last parts "
                f"differ, from each other, from the formats and from {FULL}"
            )
    return formats
