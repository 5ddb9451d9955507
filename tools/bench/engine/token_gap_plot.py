"""Gaps between tokens over time, as a picture. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.shared.errors import ConfigurationError

__all__ = ["plot_gaps"]

_COLOURS = {"adaptive": "#1b6ca8", "unchunked": "#d1495b"}


def plot_gaps(
    gaps: Mapping[str, tuple[Sequence[float], Sequence[float]]], target_s: float, path: Path
) -> None:
    """Write a PNG that shows, for each chunking mode, every gap at the time it ended.

    Args:
        gaps: by name, the ends and the lengths of the gaps, in seconds.
        target_s: the target of adaptive chunking.
        path: of the PNG.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, (ends, lengths) in gaps.items():
        times, milliseconds = list(ends), [1e3 * length for length in lengths]
        axes.plot(times, milliseconds, ".-", lw=0.8, ms=4, color=_COLOURS[name], label=name)
    axes.axhline(1e3 * target_s, color="#444444", lw=0.8, ls="--", label="target")
    axes.axhline(2e3 * target_s, color="#444444", lw=0.8, ls=":", label="2 x target")
    axes.set_yscale("log")
    axes.set_xlabel("seconds since the long prompt came", fontsize=9)
    axes.set_ylabel("gap between two tokens of a stream (ms)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"plot {path} cannot be written: {error}") from error
