"""Latencies of batching modes by rate, as a picture. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.shared.errors import ConfigurationError

__all__ = ["plot_modes"]


def plot_modes(p99_ms: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Write a PNG with one line for each mode.

    Args:
        p99_ms: by mode and requests per second, the 99th percentile of the latencies in ms.
        path: of the PNG.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for mode, by_rate in p99_ms.items():
        axes.plot(list(by_rate), list(by_rate.values()), ".-", lw=1, ms=6, label=mode)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("requests per second", fontsize=9)
    axes.set_ylabel("99th percentile of latencies (ms)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"plot {path} cannot be written: {error}") from error
