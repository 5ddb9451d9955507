"""The documentation says what is: names, tables, bytes, flags and links against the code."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
import typer
from prometheus_client.metrics import MetricWrapperBase
from rich.text import Text

from penstock.gpu_worker.metrics import WorkerMetrics
from penstock.gpu_worker.tally import TallyHistogram
from penstock.producer.cli.app import app
from penstock.shared.door_operations import DOOR_SCRIPTS
from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import GROUP, Keys
from penstock.shared.log_operations import LOG_SCRIPTS
from penstock.shared.operations import SCRIPTS, Bounds, Operations, RetryPolicy
from penstock.shared.protocol import (
    Answer,
    Chunk,
    End,
    Lane,
    Reason,
    Request,
    SamplingOptions,
    State,
    rolling_digest,
    unpack_event,
)
from penstock.shared.script_loader import load_script
from penstock.shared.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text("utf-8")
METRICS = (DOCS / "metrics.md").read_text("utf-8")


def tracked(pattern: str) -> list[Path]:
    """Files of the repository; those that only this machine has are not its documentation."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", pattern],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:  # an unpacked archive
        return [p for p in sorted(ROOT.rglob(pattern)) if p.relative_to(ROOT).parts[0][0] != "."]
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


PAGES = tracked("*.md")


def tables(page: str) -> Iterator[list[list[str]]]:
    """Every table of a page: rows of cells, the head included, the rule left out."""
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        lines = block.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        yield [row for row in rows if not re.fullmatch(r"[:-]*", "".join(row))]


def table(page: str, *head: str) -> list[list[str]]:
    """Rows of the one table whose head begins so."""
    found = [rows[1:] for rows in tables(page) if tuple(rows[0][: len(head)]) == head]
    assert len(found) == 1, f"{len(found)} tables begin with {head}"
    return found[0]


def code(cell: str) -> str:
    """The first piece of code in a cell."""
    match = re.search(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]


# -- metrics.md ----------------------------------------------------------------------------------

LANE = ("lane",)
BY_CAUSE = ("lane", "cause", "mode")
BY_PLACE = ("source", "position")
METRIC_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "penstock_accepted_tokens_total": ("counter", BY_PLACE),
    "penstock_append_refusals_total": ("counter", ("why",)),
    "penstock_cached_prompt_tokens_total": ("counter", ()),
    "penstock_claims_total": ("counter", ()),
    "penstock_compacted_logs_total": ("counter", ()),
    "penstock_door_entries_total": ("counter", ("verdict",)),
    "penstock_draft_failures_total": ("counter", ()),
    "penstock_draft_length": ("gauge", ("source",)),
    "penstock_drafted_tokens_total": ("counter", BY_PLACE),
    "penstock_exchange_seconds": ("histogram", ()),
    "penstock_generation_tokens_total": ("counter", ()),
    "penstock_grammar_deferrals_total": ("counter", ()),
    "penstock_host_blocks_total": ("gauge", ()),
    "penstock_host_blocks_used": ("gauge", ()),
    "penstock_inter_token_latency_seconds": ("histogram", ()),
    "penstock_kv_blocks_cached": ("gauge", ()),
    "penstock_kv_blocks_total": ("gauge", ()),
    "penstock_kv_blocks_used": ("gauge", ()),
    "penstock_kv_pool_blocks_cached": ("gauge", ("window",)),
    "penstock_kv_pool_blocks_total": ("gauge", ("window",)),
    "penstock_kv_pool_blocks_used": ("gauge", ("window",)),
    "penstock_orphan_tokens_total": ("counter", ()),
    "penstock_preempted_tokens_total": ("counter", BY_CAUSE),
    "penstock_preemptions_total": ("counter", BY_CAUSE),
    "penstock_prefix_cache_evictions_total": ("counter", ()),
    "penstock_prompt_tokens_total": ("counter", ()),
    "penstock_queue_requests": ("gauge", LANE),
    "penstock_queue_time_seconds": ("histogram", LANE),
    "penstock_queue_tokens": ("gauge", LANE),
    "penstock_ready": ("gauge", ()),
    "penstock_redeliveries_total": ("counter", ()),
    "penstock_redis_errors_total": ("counter", ()),
    "penstock_request_duration_seconds": ("histogram", LANE),
    "penstock_requests_total": ("counter", ("state", "reason")),
    "penstock_sequences_running": ("gauge", LANE),
    "penstock_sequences_waiting": ("gauge", LANE),
    "penstock_speculation_gain_ratio": ("gauge", ()),
    "penstock_step_failures_total": ("counter", ()),
    "penstock_step_seconds": ("histogram", ()),
    "penstock_step_sequences": ("histogram", ()),
    "penstock_step_tokens": ("histogram", ()),
    "penstock_swap_refusals_total": ("counter", ()),
    "penstock_swapped_blocks_total": ("counter", ("direction",)),
    "penstock_swapped_bytes_total": ("counter", ("direction",)),
    "penstock_swept_requests_total": ("counter", ("kind",)),
    "penstock_time_to_first_token_seconds": ("histogram", LANE),
}
"""The contract with dashboards. A name leaves or changes only with a line in CHANGELOG.md."""


def test_metric_names_types_and_labels() -> None:
    metrics = WorkerMetrics()
    exported = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase | TallyHistogram):
            (family,) = metric.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            exported[name] = (family.type, getattr(metric, "_labelnames", ()))
    assert exported == METRIC_NAMES
    collected = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.registry.collect()
    }
    assert collected == exported.keys()


def test_every_metric_is_documented_with_type_and_labels() -> None:
    documented = {}
    for rows in tables(METRICS):
        if rows[0][:3] == ["Metric", "Type", "Labels"]:
            for name, kind, labels, *rest in rows[1:]:
                assert code(name) not in documented
                assert rest[0], f"{name} has no meaning"
                documented[code(name)] = (kind, tuple(re.findall(r"`(\w+)`", labels)))
    assert documented == METRIC_NAMES


def test_metrics_named_in_prose_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"\bpenstock_[a-z_]+\b", page.read_text("utf-8")):
            stem = re.sub(r"_(bucket|count|sum)$", "", name)
            known = any(metric.startswith(stem) for metric in METRIC_NAMES)
            assert known, f"{page.relative_to(ROOT)} names {name}"


# -- protocol.md: the closed sets ------------------------------------------------------------------


def test_states_and_reasons_are_the_closed_set() -> None:
    rows = table(PROTOCOL, "State", "Reason")
    assert [(code(r[0]), code(r[1])) for r in rows] == [
        (reason.state.value, reason.value) for reason in Reason
    ]
    assert f"`{State.QUEUED}` → `{State.RUNNING}` → one of five terminal states" in PROTOCOL


def test_request_fields_and_their_defaults() -> None:
    rows = table(PROTOCOL, "Field", "Type", "Range")
    documented = {code(row[0]): row[3] for row in rows}
    assert len(documented) == len(rows), "a field stands there twice"
    names = {f.name for f in fields(Request)} | {f.name for f in fields(SamplingOptions)}
    assert documented.keys() == names - {"options"} | {"v"}
    words = {"none": (), "no bound": None, "the door's setting": None, "derived from the id": None}
    sample = Request(id="x", prompt="x")
    for name, default in documented.items():
        if default == "required":
            continue
        # The request's own seed is the one in force; its option is what was asked for.
        option = hasattr(sample.options, name)
        value = getattr(sample.options if option else sample, name)
        if default in words:
            assert value == words[default], name
        else:
            text = code(default) if "`" in default else json.loads(default)
            assert value == text, name


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", 131_072, 131_073),
        ("temperature", 10, 10.1),
        ("top_k", 2_147_483_647, 2_147_483_648),
        ("top_p", 1, 0),
        ("min_p", 1, 1.1),
        ("accept_threshold", 0.999, 1),
        ("speculation", "ngram", "always"),
        ("seed", 2**63 - 1, 2**63),
        ("deadline_ms", 604_800_000, 604_800_001),
        ("max_queue_ms", 1, 0),
        ("stop", ["x" * 256] * 16, ["x" * 257]),
        ("stop", ["x"], ["x"] * 17),
        ("stop_token_ids", [1] * 64, [1] * 65),
        ("prompt", [1] * 262_144, [1] * 262_145),
        ("tenant", "t" * 64, "t" * 65),
        ("id", "i" * 128, "i" * 129),
    ],
)
def test_ranges_are_as_documented(field: str, good: Any, bad: Any) -> None:
    Request.build(**{"id": "x", "prompt": "x", field: good})
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        Request.build(**{"id": "x", "prompt": "x", field: bad})


def test_keys_are_those_of_the_code() -> None:
    documented = {code(row[0]) for row in table(PROTOCOL, "Key", "Type")}
    keys = Keys("demo", 0)
    assert keys.prefix == "ps:{demo.0}:"
    lane = {lane.value: "<lane>" for lane in Lane}
    built = {
        keys.request("<id>"), keys.log("<id>"), keys.channel("<id>"), keys.continued,
        keys.inbox("<inbox>"),
        keys.suspects, keys.lanes, keys.floors, keys.leases, keys.owned("<worker>"),
        keys.deadlines, keys.readers, keys.counters, keys.bell, keys.dead_letters,
        keys.queue(Lane.NORMAL, "<tenant>"), keys.tenants(Lane.NORMAL), keys.doors,
        keys.intake(), keys.intake("<tenant>"), keys.ended, keys.compacting("<id>"),
    }  # fmt: skip
    names = set()
    for name in built:
        short = name.removeprefix(keys.prefix)
        for value, shown in lane.items():
            short = re.sub(rf"\b{value}\b", shown, short)
        names.add(short)
    assert documented == names
    assert f"stream + group `{GROUP}`" in PROTOCOL


def test_scripts_and_which_of_them_run_at_maxmemory() -> None:
    documented = {code(row[0]): row[2] for row in table(PROTOCOL, "Script", "What it does")}
    assert documented.keys() == {*SCRIPTS, *DOOR_SCRIPTS, *LOG_SCRIPTS}
    for name, at_maxmemory in documented.items():
        body = load_script(name).source.rpartition("-- ARGV")[2]
        runs = "allow_oom(prefix)" in body
        assert at_maxmemory == ("runs" if runs else "refused"), name


class _Recorder:
    """Stands where the server is, and keeps what would have been sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def pipeline(self, transaction: bool = True) -> Any:
        return self

    def execute_command(self, *command: Any) -> None:
        self.sent.append(command)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return [[b"ok", 1]]


async def test_keys_and_arguments_of_submit() -> None:
    recorder = _Recorder()
    operations = Operations(recorder, Keys("demo"))
    request = Request.build(id="hello", prompt="The list type", max_tokens=4, temperature=0.0)
    await operations.submit(request, bounds=Bounds(), default_deadline_ms=5)
    _, _, num_keys, *rest = recorder.sent[0]
    keys = [code(row[1]) for row in table(PROTOCOL, "KEYS")]
    shown = [k.replace("<id>", "hello").replace("<lane>", "normal") for k in keys]
    shown = [k.replace("<tenant>", "default") for k in shown]
    assert [f"ps:{{demo.0}}:{name}" for name in shown] == rest[:num_keys]
    assert len(table(PROTOCOL, "ARGV")) == len(rest) - num_keys
    assert f"EVALSHA <sha1 of the source> {num_keys} <keys> <arguments>" in PROTOCOL
    # In the transcript the digest of exactly this payload was stored.
    assert rest[num_keys + 5] == transcript_values("HGETALL")[13]


def test_limits_of_retries() -> None:
    policy = RetryPolicy()
    rows = {code(row[1]): row[2] for row in table(PROTOCOL, "State", "Reason")}
    assert rows["poison"].startswith(f"{policy.max_blames} workers in a row")
    assert rows["attempts"].startswith(f"{policy.max_attempts} workers in all")


# -- protocol.md: bytes ----------------------------------------------------------------------------


def test_digest_vectors() -> None:
    rows = table(PROTOCOL, "Output ids")
    assert len(rows) >= 4
    for ids, decimal, hexadecimal in rows:
        digest = rolling_digest(json.loads(code(ids)))
        assert (digest, f"{digest:08x}") == (int(decimal), code(hexadecimal))
    assert rolling_digest([821, 408], rolling_digest([299, 265])) == 3245392340


def _bytes(cell: str) -> bytes:
    return bytes.fromhex(code(cell))


def test_request_bytes() -> None:
    for shown, packed in table(PROTOCOL, "Request", "msgpack"):
        wire = json.loads(code(shown))
        assert msgpack.packb(wire) == _bytes(packed)
        request = Request.unpack(_bytes(packed))
        wire.pop("v")
        assert request == Request.build(**wire)
        assert request.pack() == _bytes(packed)


def test_event_bytes() -> None:
    kinds = set()
    for shown, packed in table(PROTOCOL, "Event", "msgpack"):
        assert msgpack.packb(json.loads(code(shown))) == _bytes(packed)
        event = unpack_event(_bytes(packed))
        assert event.pack() == _bytes(packed)
        kinds.add(type(event))
    assert kinds == {Chunk, End}


def test_json_events_say_the_same() -> None:
    for shown, same in table(PROTOCOL, "JSON", "the same as"):
        event = unpack_event(msgpack.packb(json.loads(code(same))))
        assert event.pack(Answer.JSON).decode() == code(shown)
        assert unpack_event(code(shown).encode()) == event


def test_captured_json_answer_is_one_whole_stream() -> None:
    door = PROTOCOL[PROTOCOL.index("## The plain door") :]
    entries = re.findall(r'^ +2\) "(\{.*\})"$', door, re.MULTILINE)
    chunk, end = (unpack_event(ast.literal_eval(f'b"{entry}"')) for entry in entries)
    assert isinstance(chunk, Chunk)
    assert isinstance(end, End)
    assert chunk.digest == rolling_digest(chunk.token_ids)
    assert (chunk.start, chunk.stop) == (0, end.n)


def transcript_values(command: str) -> list[bytes]:
    """The strings that redis-cli shows in the first capture of a command."""
    block, *_ = re.findall(rf"```console\n\$ redis-cli [^\n]*\b{command}\b(.*?)```", PROTOCOL, re.S)
    shown = re.findall(r'"(?:[^"\\]|\\.)*"', block.partition("\n")[2])
    return [ast.literal_eval(f"b{text}") for text in shown]


@pytest.mark.parametrize("command", ["SUBSCRIBE", "XRANGE"])
def test_captured_events_are_one_whole_stream(command: str) -> None:
    packed = [value for value in transcript_values(command) if value[:1] in (b"\x94", b"\x96")]
    *chunks, end = map(unpack_event, packed)
    ids: list[int] = []
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        assert chunk.start == len(ids)
        ids += chunk.token_ids
        assert chunk.digest == rolling_digest(ids)
    assert isinstance(end, End)
    assert end.n == len(ids) == 4
    text = "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk))
    assert f"{text}\ncompleted (length), 3 prompt + 4 output tokens" in PROTOCOL


def test_captured_log_entries_are_named_by_token_count() -> None:
    values = transcript_values("XRANGE")
    for entry, field, packed in zip(values[::3], values[1::3], values[2::3], strict=True):
        event = unpack_event(packed)
        if isinstance(event, Chunk):
            assert (entry.decode(), field) == (f"{event.stop}-0", b"d")
        else:
            assert (entry.decode(), field) == (f"{event.n}-1", b"e")
    assert values[2::3] == [
        v for v in transcript_values("SUBSCRIBE") if v[:1] in (b"\x94", b"\x96")
    ]


def test_captured_record_is_the_one_of_these_events() -> None:
    values = transcript_values("HGETALL")
    record = dict(zip(values[::2], values[1::2], strict=True))
    assert record[b"end"] == transcript_values("XRANGE")[-1]
    assert (record[b"st"], record[b"n"]) == (b"completed", b"4")
    source = (ROOT / "shared/scripts/lib/finish.lua").read_text("utf-8")
    described = re.split(r"local function", source)[0]
    for field in [*(name.decode() for name in record), *stable_fields()]:
        assert re.search(rf"\b{field}\b", described), field


def stable_fields() -> list[str]:
    names: list[str] = []
    for row in table(PROTOCOL, "Field", "Meaning"):
        names += re.findall(r"`(\w+)`", row[0])
    return names


# -- every page ------------------------------------------------------------------------------------


def _without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", _without_fences(page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    text = _without_fences(page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert path.is_relative_to(ROOT), target
        if anchor:
            assert anchor in _anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    """A link ``[`test_x`](path)`` is a proof that a promise names: the file must have that test."""
    text = page.read_text("utf-8")
    for name, target in re.findall(r"\[`(test_\w+)`\]\(([^)]+\.py)\)", text):
        source = (page.parent / target).read_text("utf-8")
        assert re.search(rf"^\s*(async )?def {name}\b", source, re.MULTILINE), f"{name} in {target}"


def _program() -> dict[str, Any]:
    """The program's commands by name, those that entry points add included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    added = typer.Typer()
    for name, place in project["entry-points"]["penstock.commands"].items():
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            added.add_typer(command, name=name)
        else:
            added.command(name)(command)
    found: dict[str, Any] = {}
    for group in (typer.main.get_command(app), typer.main.get_command(added)):
        found.update(group.commands)  # type: ignore[attr-defined]
    return found


def _commands() -> dict[str, set[str]]:
    """The flags of the program's commands; a group has those of all its commands."""
    return {name: {"--help", *_flags(command)} for name, command in _program().items()}


def _help_texts(command: Any) -> Iterator[str]:
    yield command.help or ""
    for parameter in command.params:
        yield getattr(parameter, "help", None) or ""
    for inner in getattr(command, "commands", {}).values():
        yield from _help_texts(inner)


@pytest.mark.parametrize("name", sorted(_program()))
def test_help_is_shown_as_it_is_written(name: str) -> None:
    """typer reads help as rich markup: ``[all]`` would be a style and ``:M:`` a picture."""
    for text in _help_texts(_program()[name]):
        assert Text.from_markup(text).plain == text


def _flags(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from _flags(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_flags_exist(page: Path) -> None:
    commands = _commands()
    text = page.read_text("utf-8")
    shown = re.findall(r"\bpenstock ([a-z]+)((?: [^\n`|;)]*)?)", "\n".join(_code_of(text)))
    for name, rest in shown:
        assert name in commands, f"penstock {name}"
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", re.sub(r'"[^"]*"', "", rest)):
            assert flag in commands[name], f"penstock {name} {flag}"


def _code_of(text: str) -> list[str]:
    """Commands in fences (lines that begin with a prompt) and in inline code."""
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    inline = [c for c in re.findall(r"`([^`\n]+)`", _without_fences(text)) if "penstock" in c]
    return [*lines, *(c for c in inline if c.startswith("penstock "))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_that_are_named_exist(page: Path) -> None:
    sections = {name: type(getattr(Settings(), name)) for name in Settings.model_fields}
    known = {f"{s}.{f}" for s, kind in sections.items() for f in kind.model_fields}
    text = page.read_text("utf-8")
    for name in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)`", text):
        assert name in known or name.endswith(".py"), name
    for variable in re.findall(r"\bPENSTOCK_([A-Z]+__[A-Z_]+[A-Z])\b", text):
        assert variable.lower().replace("__", ".", 1) in known, variable


def test_files_that_the_architecture_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    files = {path.relative_to(ROOT).as_posix() for path in (*tracked("*.py"), *tracked("*.lua"))}
    named = re.findall(r"`([\w/]+\.(?:py|lua))`", text)
    assert len(named) > 40
    missing = {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
    assert not missing
