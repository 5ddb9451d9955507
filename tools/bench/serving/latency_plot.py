"""Latencies of a load as a picture. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.shared.errors import ConfigurationError

from .request_record import RequestRecord

__all__ = ["plot_latencies"]


def plot_latencies(records: Sequence[RequestRecord], path: Path) -> None:
    """Write a PNG: the share of requests, or of gaps, that took at most so long.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [record for record in records if not record.error]
    figure = Figure(figsize=(9, 3), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, values) in zip(
        figure.subplots(1, 3),
        (
            ("time to first token", [record.ttft for record in done]),
            ("gap between events", [gap for record in done for gap in record.itl]),
            ("end to end", [record.e2el for record in done]),
        ),
        strict=True,
    ):
        ordered = sorted(1e3 * value for value in values)
        shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
        axes.step(ordered, shares, where="post", color="#1b6ca8")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("ms", fontsize=8)
        axes.set_ylabel("% at most", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"plot {path} cannot be written: {error}") from error
