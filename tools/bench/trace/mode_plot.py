"""Batching modes as a picture. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.shared.errors import ConfigurationError

__all__ = ["plot_modes"]


def plot_modes(
    tokens_per_s: Mapping[str, float], latency_ms: Mapping[str, float], path: Path
) -> None:
    """Write a PNG with throughput and 99th percentile latency as bars, mode by mode.

    Args:
        tokens_per_s: output tokens per second by mode.
        latency_ms: 99th percentile of the latency by mode, in milliseconds.
        path: of the PNG.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    labels = [name.replace("_", "\n") for name in tokens_per_s]
    for axes, values, title in (
        (left, tokens_per_s, "output tokens per second"),
        (right, {name: value / 1e3 for name, value in latency_ms.items()}, "latency p99 (s)"),
    ):
        bars = axes.bar(labels, list(values.values()), color="#1b6ca8")
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"plot {path} cannot be written: {error}") from error
