"""The documentation says what is: metrics, commands, flags, settings and links against the code."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.metrics import MetricWrapperBase
from rich.text import Text
from unit.pages import DOCS, PAGES, ROOT, code, tables, tracked

from penstock.gpu_worker.monitoring.histogram import TallyHistogram
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.producer.batches.batch_metrics import BatchMetrics
from penstock.producer.cli.app import app
from penstock.shared.settings import Settings

METRICS = (DOCS / "metrics.md").read_text("utf-8")
BATCH_METRICS = sorted(
    family.name + "_total" * (family.type == "counter")
    for family in BatchMetrics().registry.collect()
)


# -- metrics.md ----------------------------------------------------------------------------------

LANE = ("lane",)
BY_CAUSE = ("lane", "cause", "mode")
BY_PLACE = ("source", "position")
METRIC_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "penstock_accepted_tokens_total": ("counter", BY_PLACE),
    "penstock_append_refusals_total": ("counter", ("why",)),
    "penstock_batcher_batches_running": ("gauge", ()),
    "penstock_batcher_items": ("gauge", ("state",)),
    "penstock_batcher_window_seconds": ("gauge", ()),
    "penstock_cached_prompt_tokens_total": ("counter", ()),
    "penstock_claims_total": ("counter", ()),
    "penstock_compacted_logs_total": ("counter", ()),
    "penstock_ingress_entries_total": ("counter", ("verdict",)),
    "penstock_draft_failures_total": ("counter", ()),
    "penstock_drafted_tokens_total": ("counter", BY_PLACE),
    "penstock_exchange_seconds": ("histogram", ()),
    "penstock_generation_tokens_total": ("counter", ()),
    "penstock_constraint_deferrals_total": ("counter", ()),
    "penstock_host_blocks_total": ("gauge", ()),
    "penstock_host_blocks_used": ("gauge", ()),
    "penstock_inter_token_latency_seconds": ("histogram", ()),
    "penstock_isolated_errors_total": ("counter", ("task",)),
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


def test_every_metric_of_batches_has_a_row() -> None:
    rows = re.findall(
        r"^\| `(penstock_\w+)` \|", (DOCS / "batches.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(rows) == BATCH_METRICS


def test_metrics_named_in_prose_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"\bpenstock_[a-z_]+\b", page.read_text("utf-8")):
            stem = re.sub(r"_(bucket|count|sum)$", "", name)
            known = any(metric.startswith(stem) for metric in (*METRIC_NAMES, *BATCH_METRICS))
            assert known, f"{page.relative_to(ROOT)} names {name}"


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


def test_every_message_that_once_did_harm_has_a_test() -> None:
    page = (DOCS / "hostile-messages.md").read_text("utf-8")
    heads = [table[0] for table in tables(page)]
    assert {tuple(head[1:]) for head in heads} == {("Before", "Now", "Shown by")}
    for row in (row for table in tables(page) for row in table[1:]):
        assert len(row) == 4, row
        assert re.search(r"\]\(\.\./tests/[^)]+\.py\)", row[3]), row[0]


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
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", re.sub(r'"[^"]*"', "", rest)):
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
    assert named
    missing = {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
    assert not missing
