"""The command ``penstock quantize``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.producer.cli.options import JsonOption
from penstock.producer.cli.output import write_json
from penstock.shared.errors import ConfigurationError

from ..report_view import show_progress

if TYPE_CHECKING:
    from penstock.gpu_worker.model.checkpoints.checkpoint_quantizer import LayerReport

__all__ = ["quantize"]

_METHODS = ("int4", "int8", "fp8")


def quantize(
    source: Annotated[str, typer.Argument(help="Directory of the full checkpoint, or 'demo'.")],
    target: Annotated[Path, typer.Argument(help="Directory to write; must not exist.")],
    *,
    method: Annotated[str, typer.Option(help="int4, int8 or fp8.")] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale, of int4.", min=1, show_default="64"),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="int4 between a group's extremes.")
    ] = False,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file with a text a line: scales are then chosen for the activations that "
            "these give, instead of covering all weights. Needs the full model in memory.",
            show_default=False,
        ),
    ] = None,
    scale_channels: Annotated[
        bool,
        typer.Option(
            "--scale-channels",
            help="Stretch the inputs that --texts show to be large before weights are rounded, "
            "and fold the scales into the layer before.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write a quantised copy of a checkpoint, in the format that transformers reads.

    The format is compressed-tensors. Linear layers are quantised, all but the head. Prints the
    relative error and the bytes of each layer.
    """
    if method not in _METHODS:
        raise ConfigurationError(f"--method: got {method!r}; allowed: {', '.join(_METHODS)}")
    if method != "int4":
        for flag, given in (("--group-size", group_size), ("--asymmetric", asymmetric)):
            if given:
                raise ConfigurationError(
                    f"{flag}: got {given} with --method {method}; int4 alone has it: leave it out"
                )
    if scale_channels and texts is None:
        raise ConfigurationError(
            "--scale-channels: got True without --texts, whose activations choose the scales; give "
            "--texts FILE with a text a line"
        )
    from penstock.gpu_worker.model.checkpoints.checkpoint_quantizer import (
        QuantizeOptions,
        quantize_checkpoint,
    )

    options = QuantizeOptions(
        method=method,  # type: ignore[arg-type]
        group_size=64 if group_size is None else group_size,
        symmetric=not asymmetric,
        texts=() if texts is None else _lines(texts),
        scale_channels=scale_channels,
    )
    with show_progress() as progress:
        reports = quantize_checkpoint(source, target, options, progress)
    totals = {
        "layers": len(reports),
        "kept": sum(bool(report.kept) for report in reports),
        "bytes_before": sum(report.bytes_before for report in reports),
        "bytes_after": sum(report.bytes_after for report in reports),
        "greatest_error": max(report.error for report in reports),
    }
    if json:
        write_json({"target": str(target), **totals, "per_layer": [r.as_json() for r in reports]})
    else:
        _show(reports, totals, target)


def _lines(path: Path) -> Sequence[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--texts: {path} cannot be read ({error}); give a file of UTF-8 text"
        ) from error
    texts = tuple(line for line in lines if line.strip())
    if not texts:
        raise ConfigurationError(f"--texts: {path} has no text; give a file with a text a line")
    return texts


def _show(reports: Sequence[LayerReport], totals: dict[str, float], target: Path) -> None:
    console = Console(soft_wrap=True)
    scaled = any(report.alpha is not None or report.unscaled for report in reports)
    table = Table("layer", box=None)
    for title in ("error", "bytes before", "bytes after"):
        table.add_column(title, justify="right")
    for title in ("alpha", "outputs unscaled", "outputs scaled") if scaled else ():
        table.add_column(title, justify="right")
    table.add_column("")
    for report in reports:
        error = "" if report.kept else f"{report.error:.4f}"
        figures = (report.outputs_unscaled, report.outputs_error)
        scaling = [
            "" if report.alpha is None else f"{report.alpha:.2f}",
            *("" if figure is None else f"{figure:.4f}" for figure in figures),
        ]
        table.add_row(
            report.name, error, f"{report.bytes_before:,}", f"{report.bytes_after:,}",
            *(scaling if scaled else []), _remark(report),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"wrote {target}: {totals['layers'] - totals['kept']:.0f} layers in "
        f"{totals['bytes_after']:,.0f} instead of {totals['bytes_before']:,.0f} bytes, "
        f"errors up to {totals['greatest_error']:.4f}",
        markup=False, highlight=False,
    )  # fmt: skip


def _remark(report: LayerReport) -> str:
    if report.kept:
        return f"kept: {report.kept}"
    return f"not scaled: {report.unscaled}" if report.unscaled else ""
