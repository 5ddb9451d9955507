"""Commands that measure: the fields of their options are their flags, and a report is their end."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import typer

from penstock.shared.errors import ConfigurationError

from .report import Progress, Report
from .report_view import show_progress, show_report
from .simulate.report.comparison_plot import require_matplotlib

__all__ = [
    "MeasurementOptions",
    "ModelFlag",
    "PlotFlag",
    "Range",
    "RoundsFlag",
    "ThreadsFlag",
    "finish",
    "measurement",
]


@dataclasses.dataclass(frozen=True)
class Range:
    """Allowed values of a number, or of each in a sequence. ``None`` always passes.

    Attributes:
        low: the smallest.
        high: the largest; None: no limit.
        above: whether ``low`` itself is not allowed.
    """

    low: float
    high: float | None = None
    above: bool = False

    def check(self, flag: str, value: Any) -> None:
        """Raise ConfigurationError if ``value`` is not allowed."""
        if value is None:
            return
        several = isinstance(value, Sequence)
        numbers = value if several else [value]
        if not numbers or not all(map(self._allows, numbers)):
            got = list(value) if several else value
            raise ConfigurationError(f"{flag}: got {got}; allowed: {self}")

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g}, up to {self.high:g}"
        return f"{self.low:g} or more" if self.high is None else f"{self.low:g} to {self.high:g}"

    def _allows(self, number: float) -> bool:
        enough = number > self.low if self.above else number >= self.low
        return enough and (self.high is None or number <= self.high)


ModelFlag = Annotated[
    str, typer.Option(help="Directory of a checkpoint, or 'demo' for the model shipped here.")
]
RoundsFlag = Annotated[int, typer.Option(help="Rounds; a figure is their median."), Range(1)]
ThreadsFlag = Annotated[
    int | None,
    typer.Option(help="CPU threads; by default the number that suits the model."),
    Range(1),
]
PlotFlag = Annotated[
    Path | None, typer.Option(help="Write a PNG; needs the extra plot.", show_default=False)
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """Base of options whose fields are declared once, as ``Annotated[type, flag, Range]``.

    Supported types: those of typer, ``Literal`` of words, and ``Sequence[int]``, which the command
    line gives with commas between.

    Raises:
        ConfigurationError: a value is outside its :class:`Range` or ``Literal``.
    """

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            flag, value = "--" + name.replace("_", "-"), getattr(self, name)
            words = _words(hint)
            if words and value is not None and value not in words:
                raise ConfigurationError(f"{flag}: got {value!r}; allowed: {', '.join(words)}")
            for limit in hint.__metadata__:
                if isinstance(limit, Range):
                    limit.check(flag, value)


def measurement(
    *,
    title: str = "penstock bench {subject}",
    passed: str = "all limits hold",
    failed: str = "NOT within its limit: {names}",
) -> Callable[[Callable[[Any, Progress], Report]], Callable[..., None]]:
    """Make a command of a function ``(options, progress) -> Report``.

    The fields of its options are the flags, and its docstring is the help.

    Args:
        title: of the report; ``{subject}`` is the report's.
        passed: the verdict if all checks hold.
        failed: the verdict if not; ``{names}`` are the failed checks.
    """

    def command_of(measure: Callable[[Any, Progress], Report]) -> Callable[..., None]:
        options = get_type_hints(measure)["options"]
        hints = _hints(options)

        def run(as_json: bool, **given: Any) -> None:
            chosen = options(**{name: _read(name, hints[name], given[name]) for name in given})
            if getattr(chosen, "plot", None) is not None:
                require_matplotlib()
            with show_progress() as progress:
                report = measure(chosen, progress)
            titled = title.format(subject=report.subject)
            finish(report, as_json, title=titled, passed=passed, failed=failed)

        flags = [_parameter(field, hints[field.name]) for field in dataclasses.fields(options)]
        run.__doc__ = measure.__doc__
        run.__signature__ = inspect.Signature([*flags, _JSON])  # type: ignore[attr-defined]
        return run

    return command_of


def finish(report: Report, as_json: bool, *, title: str, passed: str, failed: str) -> NoReturn:
    """Print the report and exit: 0 if all limits hold, else 1. For the texts see show_report."""
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        show_report(report, title=title, passed=passed, failed=failed)
    raise typer.Exit(0 if report.ok else 1)


_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--json", help="Print one JSON object: figures, checks, notes, spread.")
    ],
)


def _hints(options: type[Any]) -> dict[str, Any]:
    return get_type_hints(options, include_extras=True)


def _kind(hint: Any) -> Any:
    """The type of an annotation, without its metadata and ``None``."""
    kinds = [kind for kind in get_args(hint.__origin__) if kind is not type(None)]
    optional = len(kinds) < len(get_args(hint.__origin__))
    return kinds[0] if optional else hint.__origin__


def _words(hint: Any) -> tuple[str, ...]:
    kind = _kind(hint)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _is_list(hint: Any) -> bool:
    return get_origin(_kind(hint)) is Sequence


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    kind, default = hint.__origin__, field.default
    if _is_list(hint):
        kind, default = str, ",".join(map(str, default))  # type: ignore[arg-type]
    elif _words(hint):
        kind = str | None if default is None else str
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[(kind, *hint.__metadata__)],
    )


def _read(name: str, hint: Any, given: Any) -> Any:
    if not _is_list(hint):
        return given
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"got {given!r}; allowed: whole numbers with commas between",
            param_hint="--" + name.replace("_", "-"),
        ) from None
