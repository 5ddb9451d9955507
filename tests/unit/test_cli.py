"""The program's surface: help, errors of one line, exit codes, added commands, what is shown."""

from __future__ import annotations

import importlib.metadata
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import typer
from unit.terminal import Terminal

from penstock.producer.cli import main
from penstock.producer.cli.output import TextWriter, one_line, printable
from penstock.shared.errors import UnsupportedModel

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
