"""The comparison as a picture. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.shared.distribution import install_command
from penstock.shared.errors import ConfigurationError

from ..dispatch import Dispatch
from ..scenario import Outcome

__all__ = ["plot", "require_matplotlib"]

_COLOURS = {
    Dispatch.PULL: "#1b6ca8",
    Dispatch.ROUND_ROBIN: "#d1495b",
    Dispatch.LEAST_LOADED: "#edae49",
}


def require_matplotlib() -> None:
    """Fail before hours of simulation instead of after.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            f"--plot needs matplotlib: {install_command('plot')}, or leave --plot out"
        ) from None


def plot(outcomes: list[Outcome], path: Path) -> None:
    """Write p99 TTFT, p99 end to end and goodput per worker as bars, by size of the fleet.

    Args:
        outcomes: of scenarios that differ in workers and dispatch; other settings form further
            groups.
        path: of the PNG.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    groups = list(dict.fromkeys(_group(outcome) for outcome in outcomes))
    kinds = list(dict.fromkeys(outcome.scenario.dispatch for outcome in outcomes))
    panels: list[tuple[str, Callable[[Outcome], float]]] = [
        ("p99 time to first token (s)", lambda outcome: outcome.total.ttft.quantile(0.99)),
        ("p99 end to end (s)", lambda outcome: outcome.total.e2e.quantile(0.99)),
        (
            "goodput (requests/s per worker)",
            lambda outcome: outcome.goodput / outcome.scenario.workers,
        ),
    ]
    for axes, (title, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        width = 0.8 / len(kinds)
        for number, kind in enumerate(kinds):
            own = [outcome for outcome in outcomes if outcome.scenario.dispatch is kind]
            places = [groups.index(_group(outcome)) + number * width for outcome in own]
            bars = axes.bar(
                places, [value(outcome) for outcome in own], width,
                label=kind.value, color=_COLOURS[kind],
            )  # fmt: skip
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        middle = width * (len(kinds) - 1) / 2
        axes.set_xticks([index + middle for index in range(len(groups))], groups)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center", ncols=len(kinds), fontsize=8, frameon=False,
    )  # fmt: skip
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"plot {path} cannot be written: {error}") from error


def _group(outcome: Outcome) -> str:
    """Name of the scenario without its dispatch."""
    scenario = outcome.scenario
    prefix = scenario.dispatch.value.replace("-", "_") + "_w"
    workers, _, rest = scenario.name.removeprefix(prefix).partition("_")
    plural = "" if workers == "1" else "s"
    return f"{workers} worker{plural}" + (f"\n{rest}" if rest else "")
