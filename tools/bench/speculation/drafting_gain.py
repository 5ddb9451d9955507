"""Tokens per second without drafts, with each drafter, and with what the worker would choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, SpeculationStats
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.states import Speculation

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from .bench_models import Models, load_models
from .fixed_batch import Side, alternate
from .prompts import Requests, documentation, edits, hot, steered
from .speculation_options import SpeculationOptions

__all__ = ["bench_speculation"]

_WITHIN = 0.97
_AT_ONE = 1.6
_EDITING = 2.0
_HOT_BATCH = 4
_SOURCES = {"ngram": Speculation.NGRAM, "draft": Speculation.DRAFT}
"""Modes in which all drafts come from one place."""

_WARM_UP_ROUNDS = 10
"""Not counted: a worker lives for hours, and soon knows what it finds out in its first seconds."""


def bench_speculation(options: SpeculationOptions, progress: Progress = lambda *_: None) -> Report:
    """All modes in turn on the same requests, some steps of each, for each batch size.

    ``ngram`` and ``draft`` draft ``length`` tokens always; ``auto`` decides for itself, in one
    engine that lives through all rounds, as a worker does. A round is ``tokens`` output tokens of
    each sequence; the first ten of each workload are not counted. CPU time of the process, since
    on a busy machine the clock also counts others' work. With several CPU threads the clock's,
    since they wait for each other at work. The best mode is the one with the best median.

    Raises:
        ModelError: a model cannot be loaded.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    try:
        models = load_models(options)
        bench = _Bench(options, models)
        workloads = _workloads(options)
        done = 0
        with calm_collector():
            for name, (requests, count) in workloads.items():
                bench.turn_to(name, requests, count)
                for number in range(-_WARM_UP_ROUNDS, options.rounds):
                    bench.measure(rounds if number >= 0 else None, name, count)
                    done += number >= 0
                    progress(name, done, len(workloads) * options.rounds)
                bench.compare(rounds, name)
                for figure, value in bench.acceptance(name):
                    rounds.add(figure, value)
        notes = (
            *models.notes,
            f"{torch.get_num_threads()} CPU threads; ngram and draft draft {options.length} tokens",
        )
        return rounds.report("spec", machine, at_least=_limits(workloads, options), notes=notes)
    finally:
        torch.set_num_threads(threads)


def _workloads(options: SpeculationOptions) -> dict[str, tuple[Requests, int]]:
    """What is asked for by name, and by how many at a time."""
    text = documentation if options.shape is None else steered
    chosen: dict[str, tuple[Requests, int]] = {f"b{n}": (text, n) for n in options.batches}
    if options.shape is None and options.tasks:
        chosen |= {"edit": (edits, 1), "hot": (hot, _HOT_BATCH)}
    return chosen


def _limits(workloads: Iterable[str], options: SpeculationOptions) -> list[tuple[str, float]]:
    limits = [(f"auto_vs_best.{name}", _WITHIN) for name in workloads]
    limits += [(f"auto_vs_plain.{name}", _WITHIN) for name in workloads if name != "b1"]
    if options.shape is None and "b1" in workloads:
        limits.append(("auto_vs_plain.b1", _AT_ONE))
    if "edit" in workloads:
        limits.append(("ngram_vs_plain.edit", _EDITING))
    return limits


class _Bench:
    """An engine for each mode, each with KV of its own."""

    def __init__(self, options: SpeculationOptions, models: Models) -> None:
        self._options = options
        self._models = models
        full, fixed = models.speculation, options.length
        configs: Mapping[str, SpeculationConfig | None] = {
            "plain": None,
            "ngram": dataclasses.replace(full, draft=False, length=fixed),
            "draft": dataclasses.replace(full, ngram=False, length=fixed),
            "auto": full,
        }
        self._sides = {
            mode: self._side(config)
            for mode, config in configs.items()
            if (mode != "ngram" or full.ngram) and (mode != "draft" or full.draft)
        }
        self._warm = self._counts()

    def _side(self, speculation: SpeculationConfig | None) -> Side:
        config = dataclasses.replace(self._models.config, speculation=speculation)
        engine = Engine(config, self._models.new_text_stream)
        cpu_time = not self._options.clock and torch.get_num_threads() == 1
        return Side(engine, self._models.new_runner(), cpu_time=cpu_time)

    def turn_to(self, name: str, requests: Requests, count: int) -> None:
        """Begin a workload."""
        for side in self._sides.values():
            side.turn_to(requests(self._models, self._options, name), count)

    def measure(self, rounds: Rounds | None, name: str, count: int) -> None:
        """A round of it; None: it warms up and is not counted."""
        alternate(list(self._sides.values()), count * self._options.tokens)
        if rounds is None:
            self._warm = self._counts()
            return
        rates = {mode: side.rate for mode, side in self._sides.items()}
        for mode, rate in rates.items():
            rounds.add(f"{mode}.{name}", rate)
            if mode != "plain":
                rounds.add(f"{mode}_vs_plain.{name}", rate / rates["plain"])

    def compare(self, rounds: Rounds, name: str) -> None:
        """The figures of a workload whose rounds are over."""
        others = (f"{mode}.{name}" for mode in self._sides if mode != "auto")
        best = max(others, key=rounds.median)
        for ratio in rounds.ratios(f"auto.{name}", best):
            rounds.add(f"auto_vs_best.{name}", ratio)

    def acceptance(self, name: str) -> Iterable[tuple[str, float]]:
        """Of the drafts at each position, the share that was accepted since the warm-up."""
        for mode, stats in self._counts().items():
            source, before = _SOURCES[mode], self._warm[mode]
            for position in range(1, self._options.length + 1):
                key = source, position
                drafted = stats.drafted.get(key, 0) - before.drafted.get(key, 0)
                if drafted:
                    accepted = stats.accepted.get(key, 0) - before.accepted.get(key, 0)
                    yield f"acceptance.{mode}.{name}.p{position}", accepted / drafted

    def _counts(self) -> dict[str, SpeculationStats]:
        """What the modes with one source have drafted so far."""
        counts = {}
        for mode in _SOURCES:
            stats = self._sides[mode].engine.stats().speculation if mode in self._sides else None
            if stats is not None:
                counts[mode] = stats
        return counts
