"""The program's surface: help, errors of one line, exit codes, added commands, what is shown."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from penstock.producer.cli import main
from penstock.producer.cli.demo.metrics_watch import parse_metrics
from penstock.producer.cli.demo.summary import (
    DemoReport,
    EngineFigures,
    FaultFigures,
    Row,
    Takeover,
    demo_rows,
)
from penstock.producer.cli.demo.view import LiveView, PlainView, make_view
from penstock.producer.cli.output import TextWriter, one_line, printable, summary
from penstock.shared.errors import UnsupportedModel
from penstock.shared.protocol import Chunk, End, Lane, Reason, Request, State, Usage

NOWHERE = "redis://127.0.0.1:1"


@dataclass
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("REDIS_URL", NOWHERE)

    def run(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return Done(main(arguments), *capsys.readouterr())

    return run


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server seems to be there, so that what comes after it is looked at."""

    async def connect(self: object) -> object:
        return self

    monkeypatch.setattr("penstock.producer.client.Producer.connect", connect)


def check_error(done: Done, pattern: str, code: int = 2) -> None:
    """One line on standard error that matches, nothing on standard output, and the exit code."""
    assert (done.code, done.out) == (code, "")
    assert re.fullmatch(f"error: {pattern}\n", done.err), done.err


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_the_commands(penstock: Run, arguments: tuple[str, ...]) -> None:
    done = penstock(*arguments)
    assert (done.code, done.err) == (0, "")
    for command in ("demo", "submit", "stream", "result", "cancel"):
        assert re.search(rf"\b{command}\b", done.out)


@pytest.mark.parametrize("command", ["demo", "submit", "stream", "result", "cancel"])
def test_every_command_has_help(penstock: Run, command: str) -> None:
    done = penstock(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert "--redis" in done.out
    assert "--json" in done.out


def test_version(penstock: Run) -> None:
    done = penstock("--version")
    assert done.code == 0
    assert re.fullmatch(r"penstock (\d+\.\d+\.\d+|\(not installed\))\n", done.out)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["sbumit"], r"No such command 'sbumit'. Did you mean 'submit'\? \(see 'penstock --.*"),
        (["submit"], r"Missing argument '(prompt|PROMPT)'. \(see 'penstock submit --help'\)"),
        (["submit", "x", "--nonsense"], r"No such option: --nonsense.*"),
        (["submit", "x", "--max-tokens", "many"], r"max_tokens: got 'many'; allowed: an .*"),
        (["stream", "x", "--shard", "many"], r"Invalid value for '--shard': .*'many'.*"),
        (["submit", ""], r"prompt: got ''; allowed: non-empty text.*"),
        (["submit", "x", "--max-tokens", "0"], r"max_tokens: got 0; allowed: .* from 1 to .*"),
        (["submit", "x", "--max-tokens", "-3"], r"max_tokens: got -3; .*"),
        (["submit", "x", "--temperature", "-1"], r"temperature: got -1.0; allowed: .*"),
        (["submit", "x", "--temperature", "nan"], r"temperature: got 'nan'; .*"),
        (["submit", "x", "--top-p", "0"], r"top_p: got 0.0; .*"),
        (["submit", "x", "--lane", "urgent"], r"lane: got 'urgent'; .*critical or normal or batch"),
        (["submit", "x", "--tenant", "a b"], r"tenant: got 'a b'; .*"),
        (["submit", "x", "--id", ""], r"id: got ''; .*"),
        (["submit", "x", "--stop", ""], r"stop\[0\]: got ''; .*"),
        (["submit", "x", "--deadline-ms", "0"], r"deadline_ms: got 0; .*"),
        (["submit", "\udcff"], r"prompt: got .*without lone surrogates"),
        (["submit", "x", "--model", "a b"], r"queue.model = 'a b' .*"),
        (["submit", "x", "--shard", "-1"], r"queue.shard = -1 .*"),
        (["submit", "x", "--redis", "http://h"], r"redis.url = 'http://h' .*"),
        (["submit", "x", "--config", "/none.toml"], r"settings file /none.toml: No such file.*"),
        (["stream", "x", "--from-index", "-1"], r"from_index: got -1; .*"),
        (["stream", "x", "--timeout", "nan"], r"timeout: got nan; .*"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("connected")
def test_bad_input_gets_one_line_and_exit_code_2(
    penstock: Run, arguments: list[str], pattern: str
) -> None:
    check_error(penstock(*arguments), pattern)


@pytest.mark.parametrize("command", ["submit", "stream", "result", "cancel"])
def test_an_unreachable_server(penstock: Run, command: str) -> None:
    pattern = r"cannot reach Redis at redis://127.0.0.1:1/0: .*; start the server, or set .*"
    check_error(penstock(command, "x"), pattern)
    with_password = penstock(command, "x", "--redis", "redis://:secret@127.0.0.1:1")
    check_error(with_password, pattern)
    assert "secret" not in with_password.err


def test_no_server_configured(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL")
    check_error(penstock("submit", "x"), r"no Redis server is configured: set REDIS_URL, .*")


@pytest.mark.usefixtures("connected")
def test_a_prompt_from_standard_input(penstock: Run) -> None:
    check_error(penstock("submit", "-", stdin=b""), r"prompt: got ''; allowed: non-empty text.*")
    wrong = penstock("submit", "-", stdin=b"caf\xe9 au lait")
    check_error(
        wrong,
        r"prompt: got b'caf\\xe9 au lait'; "
        r"allowed: UTF-8 text; byte 3 of standard input is not",
    )


def point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, "penstock.commands")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install commands by entry point."""

    def install(**functions: Callable[..., object] | Exception) -> None:
        points = []
        for name, function in functions.items():
            found = point(name, f"somewhere:{name}")

            def load(self: object, function: object = function) -> object:
                if isinstance(function, Exception):
                    raise function
                return function

            points.append(SimpleNamespace(name=found.name, load=load.__get__(found)))
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)

    return install


def test_other_packages_add_commands(penstock: Run, added: Callable[..., None]) -> None:
    def measure(size: int = 3) -> int:
        """Measure something."""
        print("size", size)
        return size

    def refuse() -> None:
        raise UnsupportedModel("this architecture\nis unknown")

    def import_torch() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    group = typer.Typer(help="Measure much.")
    group.command("one")(measure)
    group.command("other")(refuse)

    added(measure=measure, refuse=refuse, late=import_torch, group=group)
    listed = penstock("--help").out
    assert "measure" in listed
    assert "Measure much." in listed
    assert "Measure something." in listed
    done = penstock("measure", "--size", "4")
    assert (done.code, done.out) == (4, "size 4\n")
    assert penstock("group", "one", "--size", "5").out == "size 5\n"
    check_error(penstock("group", "other"), "this architecture is unknown")
    check_error(penstock("refuse"), "this architecture is unknown")
    check_error(
        penstock("late"), r"this command needs the package torch, .*penstock-llm\[worker\]'"
    )


def test_commands_whose_packages_are_missing(penstock: Run, added: Callable[..., None]) -> None:
    added(
        worker=ModuleNotFoundError("No module named 'torch'", name="torch"),
        broken=ModuleNotFoundError("No module named 'nonsense'", name="nonsense"),
    )
    for arguments in (("worker",), ("worker", "--model", "x", "--help", "y")):
        check_error(
            penstock(*arguments),
            r"this command needs the package torch, which is not installed: "
            r"pip install 'penstock-llm\[worker\]'",
        )
    with pytest.raises(ModuleNotFoundError, match="nonsense"):  # a bug keeps its traceback
        penstock("broken")


def test_a_bug_keeps_its_traceback(penstock: Run, added: Callable[..., None]) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    added(fail=fail)
    with pytest.raises(ZeroDivisionError):
        penstock("fail")


def test_an_interrupt_is_quiet(penstock: Run, added: Callable[..., None]) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    added(wait=wait)
    done = penstock("wait")
    assert (done.code, done.out, done.err) == (130, "", "")


def test_an_interrupt_while_the_program_is_imported_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "penstock.producer.cli.app")
    monkeypatch.setattr(typer, "Typer", interrupt)
    assert main(["--version"]) == 130


def test_text_moves_no_cursor() -> None:
    assert printable("a\x1b[31mb\x07\tc\nd\x7f\x9b") == "a␛[31mb␇\tc\nd␡\ufffd"
    assert one_line("two\n  lines\x1b") == "two lines␛"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_in_a_pipe_is_exact_and_on_a_terminal_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, expected in ((io.StringIO(), "a\x1b[2Jb\n"), (Terminal(), "a␛[2Jb\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        writer = TextWriter()
        for piece in ("a\x1b", "[2J", "", "b"):
            writer.write(piece)
        writer.close()
        writer.close()
        assert stream.getvalue() == expected


def test_a_terminal_without_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["--version"]) == 0
    TextWriter().write("naïve")
    assert terminal.buffer.getvalue().endswith(b"na?ve")  # type: ignore[attr-defined]


def test_the_summary_of_a_request() -> None:
    usage = Usage(prompt_tokens=4, output_tokens=9, queue_ms=0, ttft_ms=12, attempts=1)
    text = summary(End(n=9, reason=Reason.STOP, usage=usage))
    assert text == "completed (stop), 4 prompt + 9 output tokens, queue 0 ms, first token 12 ms"


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP x y\n# TYPE x gauge\nx{lane="a"} 1\nx{lane="b c"} 2.5\ny 3e2\n\n'
    assert parse_metrics(text) == {"x": 3.5, "y": 300.0}


def test_the_demos_requests_are_valid_and_mixed() -> None:
    rows = demo_rows()
    assert len(rows) == 12
    lanes = [row.lane for row in rows]
    assert lanes == sorted(lanes, key=lambda lane: -lane.rank)  # urgent work comes last
    assert {(row.lane, row.tenant) for row in rows} == {
        (lane, tenant) for lane in Lane for tenant in ("app", "docs")
    }
    assert {row.is_chat for row in rows} == {True, False}
    for row in rows:
        Request.build(id="x", prompt=row.prompt, lane=row.lane, tenant=row.tenant, **row.options)


@pytest.fixture
def report() -> DemoReport:
    """One request completed, one failed, one still queued."""
    usage = Usage(prompt_tokens=3, output_tokens=2, queue_ms=5, ttft_ms=20, attempts=1)
    done = Row(prompt="The list type", lane=Lane.BATCH, tenant="docs")
    done.add(Chunk(0, (1, 2), " is [bold]a\n\x1b[31mlist", 0))
    done.end = End(n=2, reason=Reason.LENGTH, usage=usage)
    done.mean_itl_ms = 7.25
    failed = Row(prompt=[{"role": "user", "content": "Why?"}], lane=Lane.NORMAL, tenant="app")
    failed.end = End(n=0, reason=Reason.ENGINE_ERROR)
    waiting = Row(prompt="def f(", lane=Lane.CRITICAL, tenant="app")
    figures = EngineFigures(mean_batch=3.456, kv_blocks_peak=10, kv_blocks_total=80)
    return DemoReport(rows=[done, failed, waiting], wall_s=0.5, engine=figures)


def test_the_report_in_a_pipe(report: DemoReport) -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=100))
    with view.streaming(report.rows):
        for row in report.rows:
            view.ended(row)
    view.finish(report, 9.87)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "batch     docs    completed     2 tokens  The list type is [bold]a ␛[31mlist" in text
    assert "normal    app     failed        0 tokens  Why? | \n" in text
    cells = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert [
        "The list type", "batch", "docs", "3", "2", "5 ms", "20 ms", "7.2 ms", "length",
    ] in cells  # fmt: skip
    assert ["Why?", "normal", "app", "-", "0", "-", "-", "-", "engine_error"] in cells
    assert text.endswith(
        "1 of 3 completed\n2 tokens in 0.50 s = 4 tokens/s\nmean batch 3.5 sequences\n"
        "KV peak 10 of 80 blocks (12.5 %)\n9.9 s in all\n"
    )


def test_the_report_without_the_workers_figures(report: DemoReport) -> None:
    out = io.StringIO()
    bare = DemoReport(rows=report.rows, wall_s=0.5, engine=EngineFigures())
    PlainView(Console(file=out, width=100)).finish(bare, 1)
    assert "batch " not in out.getvalue().split("completed\n")[-1]
    assert bare.facts()["figures"]["mean_batch"] is None
    assert json.dumps(bare.facts())


def test_the_report_of_a_killed_worker(report: DemoReport) -> None:
    done, unread, _ = report.rows
    done.id, unread.id = "a", "b"
    takeovers = [
        Takeover(row=done, index=1, pause_ms=41.4, identical=True),
        Takeover(row=unread, identical=True),
    ]
    faults = FaultFigures(
        worker_id="w", pid=7, takeovers=takeovers, reader=unread, left_at=9, away_ms=80, missed=3,
        caught_up_ms=2.2,
    )  # fmt: skip
    killed = dataclasses.replace(report, faults=faults)
    out = io.StringIO()
    PlainView(Console(file=out, width=118)).finish(killed, 1)
    text = out.getvalue()
    assert re.search(r"length +at 1, 41 ms", text)
    assert re.search(r"engine_error +unread", text)
    assert (
        "killed a worker amid 2 streams: they went on with the other within 41 ms\n"
        "a reader left at token 9 and came back 80 ms later; it had the 3 tokens that it missed in "
        "2 ms\n2 of 2 disturbed streams are, token for token, as undisturbed\n"
    ) in text
    assert killed.facts()["faults"]["takeovers"][0]["pause_ms"] == 41.4


def test_a_stream_that_changed_is_a_broken_promise(report: DemoReport) -> None:
    (done, *_) = report.rows
    takeover = Takeover(row=done, index=1, pause_ms=1, identical=True)
    faults = FaultFigures(worker_id="w", pid=7, takeovers=[takeover], reader=done, left_at=1)
    kept = DemoReport(rows=[done], wall_s=1, engine=report.engine, faults=faults)
    assert kept.as_promised
    takeover.identical = False
    assert not kept.as_promised
    assert not report.as_promised, "two of its requests did not complete"


def test_the_longest_pause_since_a_moment() -> None:
    row = Row(prompt="x", lane=Lane.BATCH, tenant="t")
    assert row.longest_pause(0) is None
    row.arrivals = [(1.0, 1), (3.0, 2), (3.25, 4), (3.375, 5)]
    assert row.longest_pause(0) == (1, 2000)
    assert row.longest_pause(3.1) == (2, 250)
    assert row.longest_pause(3.5) is None


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_view_keeps_a_row_a_line(report: DemoReport, width: int) -> None:
    out = Terminal()
    console = Console(file=out, width=width, height=40, force_terminal=True, color_system=None)
    view = LiveView(console)
    report.rows[0].text *= 100
    console.print(view.side_by_side(report.rows))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 2 + len(report.rows)
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        assert "completed" in lines[2]
        assert "The list type" in lines[2]
        assert lines[2].rstrip().endswith("[31mlist")  # the tail, where it grows


def test_the_live_view_follows_and_reports(report: DemoReport) -> None:
    out = Terminal()
    view = LiveView(Console(file=out, width=100, height=40, force_terminal=True))
    with view.loading():
        pass
    with view.streaming(report.rows):
        view.ended(report.rows[0])
    view.finish(report, 1)
    assert "loading the model" in out.getvalue()
    assert "1 of 3 completed" in out.getvalue()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # the cursor


def test_the_view_suits_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert type(make_view(json=False)) is LiveView
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(make_view(json=False)) is PlainView
    assert Row(prompt="x", lane=Lane.BATCH, tenant="t").state is State.QUEUED
