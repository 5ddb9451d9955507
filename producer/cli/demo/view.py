"""How the demo looks: side by side on a terminal, line by line in a pipe, JSON for scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from penstock.shared.protocol.states import Lane, State

from ..output import printable, write_json
from .summary import DemoReport, FaultFigures, Row, Takeover

__all__ = ["JsonView", "LiveView", "PlainView", "make_view"]

_LANE_STYLES = {Lane.CRITICAL: "bold red", Lane.NORMAL: "cyan", Lane.BATCH: "dim"}
_STATE_STYLES = {State.QUEUED: "dim", State.RUNNING: "yellow", State.COMPLETED: "green"}
_PIPE_WIDTH = 118


class PlainView:
    """A line per event and per ended request, then the tables.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        """Tell of progress."""
        self.console.print(printable(text), style="dim", markup=False, highlight=False)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The time in which the workers load the model."""
        began = time.monotonic()
        self.note("loading the model ...")
        yield
        self.note(f"loaded in {time.monotonic() - began:.1f} s")

    @contextmanager
    def streaming(self, rows: Sequence[Row]) -> Iterator[None]:
        """The time in which tokens come."""
        self.note(f"{len(rows)} requests; a line for each as it ends")
        yield

    def checking(self) -> None:
        """The disturbed streams are compared with undisturbed ones."""
        self.note("the same requests again, undisturbed, to compare all tokens")

    def ended(self, row: Row) -> None:
        """A request has ended."""
        head = (
            f"{row.lane.value:<8}  {row.tenant:<6}  {row.state.value:<9}  {row.tokens:>4} tokens  "
        )
        text = Text(head + _shown_prompt(row) + _flat(row.text))
        self.console.print(text, no_wrap=True, overflow="ellipsis")

    def finish(self, report: DemoReport, total_s: float) -> None:
        """Everything has ended: a row per request, then the totals."""
        self.console.print(_outcome_table(report), Text(_totals(report, total_s)), sep="\n")


class LiveView(PlainView):
    """The same on a terminal, with all streams side by side while they run."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """See :class:`PlainView`."""
        began = time.monotonic()
        spinner = Spinner("dots", "")

        def show() -> Spinner:
            spinner.update(text=f"loading the model, {time.monotonic() - began:.1f} s")
            return spinner

        with Live(get_renderable=show, console=self.console, transient=True):
            yield
        self.note(f"loaded the model in {time.monotonic() - began:.1f} s")

    @contextmanager
    def streaming(self, rows: Sequence[Row]) -> Iterator[None]:
        """See :class:`PlainView`."""
        with Live(get_renderable=lambda: self.side_by_side(rows), console=self.console):
            yield

    def ended(self, row: Row) -> None:
        """See :class:`PlainView`; the live rows show it already."""

    def side_by_side(self, rows: Sequence[Row]) -> Table:
        """The picture of this moment: a line per request, with the end of its text."""
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
        for name, width in (("lane", 8), ("tenant", 6), ("state", 9)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("tokens", width=6, justify="right")
        table.add_column("text", ratio=1, no_wrap=True)
        for row in rows:
            table.add_row(
                Text(row.lane.value, style=_LANE_STYLES[row.lane]),
                row.tenant,
                Text(row.state.value, style=_STATE_STYLES.get(row.state, "red")),
                str(row.tokens),
                _Growing(_shown_prompt(row), _flat(row.text)),
            )
        return table


class JsonView(PlainView):
    """Nothing until the end, then one object."""

    def note(self, text: str) -> None:
        """See :class:`PlainView`; says nothing."""

    def ended(self, row: Row) -> None:
        """See :class:`PlainView`; says nothing."""

    def finish(self, report: DemoReport, total_s: float) -> None:
        """See :class:`PlainView`."""
        facts = report.facts()
        facts["figures"]["total_s"] = total_s
        write_json(facts)


def make_view(*, json: bool) -> PlainView:
    """The view that suits standard output."""
    if json:
        return JsonView(Console())
    if sys.stdout.isatty():
        return LiveView(Console(highlight=False))
    return PlainView(Console(highlight=False, width=_PIPE_WIDTH))


class _Growing:
    """A prompt and as much of the end of its continuation as there is room for."""

    def __init__(self, prompt: str, text: str) -> None:
        self._prompt = prompt
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = options.max_width - len(self._prompt)
        tail = self._text
        if len(tail) > room:
            tail = "… " + tail[len(tail) - max(0, room - 2) :]
        yield Text.assemble((self._prompt, "bold"), tail, no_wrap=True, overflow="ellipsis")


def _flat(text: str) -> str:
    """Text on one line."""
    return printable(" ".join(text.split(" ")).replace("\n", " ").replace("\t", " "))


def _shown_prompt(row: Row) -> str:
    """The prompt so that its continuation can follow it."""
    return f"{row.title} | " if row.is_chat else row.title


def _outcome_table(report: DemoReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("request", no_wrap=True)
    table.add_column("lane")
    table.add_column("tenant")
    for name in ("prompt", "output", "queue", "TTFT", "mean ITL"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    moved = {} if report.faults is None else {t.row.id: t for t in report.faults.takeovers}
    if moved:
        table.add_column("went on", justify="right", no_wrap=True)
    for row in report.rows:
        usage = None if row.end is None else row.end.usage
        table.add_row(
            Text(row.title),
            Text(row.lane.value, style=_LANE_STYLES[row.lane]),
            row.tenant,
            "-" if usage is None else str(usage.prompt_tokens),
            str(row.tokens),
            _ms(None if usage is None else usage.queue_ms),
            _ms(None if usage is None else usage.ttft_ms),
            _ms(row.mean_itl_ms, digits=1),
            "-" if row.end is None else row.end.reason.value,
            *([_went_on(moved.get(row.id))] if moved else []),
        )
    return table


def _went_on(takeover: Takeover | None) -> str:
    if takeover is None:
        return ""
    if takeover.index is None:
        return "unread"
    return f"at {takeover.index}, {_ms(takeover.pause_ms)}"


def _totals(report: DemoReport, total_s: float) -> str:
    engine = report.engine
    speed = f"{report.tokens_per_s:.0f} tokens/s"
    parts = [
        f"{report.completed} of {len(report.rows)} completed",
        f"{report.output_tokens} tokens in {report.wall_s:.2f} s = {speed}",
    ]
    if engine.mean_batch is not None:
        parts.append(f"mean batch {engine.mean_batch:.1f} sequences")
    if engine.kv_blocks_peak is not None and engine.kv_blocks_total:
        share = 100 * engine.kv_blocks_peak / engine.kv_blocks_total
        parts.append(
            f"KV peak {engine.kv_blocks_peak} of {engine.kv_blocks_total} blocks ({share:.1f} %)"
        )
    if report.faults is not None:
        parts += _fault_lines(report.faults)
    parts.append(f"{total_s:.1f} s in all")
    return "\n".join(parts)


def _fault_lines(faults: FaultFigures) -> list[str]:
    pauses = [t.pause_ms for t in faults.takeovers if t.pause_ms is not None]
    moved = len(faults.takeovers)
    streams = "1 stream: it" if moved == 1 else f"{moved} streams: they"
    kill = f"killed a worker amid {streams} went on with the other"
    reader = f"a reader left at token {faults.left_at} and came back {faults.away_ms:.0f} ms later"
    missed = f"it had the {faults.missed} tokens that it missed in {faults.caught_up_ms:.0f} ms"
    return [
        f"{kill} within {_ms(max(pauses))}" if pauses else kill,
        f"{reader}; {missed}",
        f"{faults.identical} of {moved} disturbed streams are, token for token, as undisturbed",
    ]


def _ms(value: float | None, *, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f} ms"
