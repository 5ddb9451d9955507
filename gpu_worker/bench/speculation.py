"""Tokens per second without drafts, with each drafter, and with what the worker would choose."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
import random
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from penstock.shared.protocol import Lane, SamplingOptions, Speculation
from penstock.shared.report import Report
from penstock.shared.settings import load_settings

from ..engine.engine import Engine
from ..engine.requests import EngineRequest
from ..engine.speculation import SpeculationConfig, SpeculationStats
from ..garbage import calm_collector
from ..model.serving import build_model
from ..serving import ServingModel
from .options import SpeculationOptions
from .rounds import Machine, Progress, Rounds

__all__ = ["bench_speculation"]

_MODES = ("plain", "ngram", "draft", "auto")
_WITHIN = 0.97
_HOT = 3.0


def bench_speculation(options: SpeculationOptions, progress: Progress = lambda *_: None) -> Report:
    """All modes in turn on the same requests, ``rounds`` times for each batch size.

    ``ngram`` and ``draft`` draft ``length`` tokens always; ``auto`` decides for itself, in one
    engine that lives through all rounds, as a worker does. The text is documentation that the
    interpreter carries, generated greedily. CPU time of the process, as on a busy machine the
    clock would tell of others.

    Raises:
        ModelError: a model cannot be loaded.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    try:
        bench = _Bench(options)
        stages = (len(options.batches) + 2) * options.rounds
        done = 0
        with calm_collector():
            for batch in options.batches:
                for number in range(-1, options.rounds):
                    bench.compare(rounds, number, f"b{batch}", bench.documentation(number, batch))
                    done += number >= 0
                    progress(f"batch of {batch}", done, stages)
            for name, make in (("edit", bench.edits), ("hot", bench.hot)):
                for number in range(-1, options.rounds):
                    bench.compare(rounds, number, name, make(number))
                    done += number >= 0
                    progress(name, done, stages)
        for name, value in bench.acceptance():
            rounds.add(name, value)
        at_least = [(f"auto_vs_best.{name}", _WITHIN) for name in bench.workloads]
        return rounds.report(
            "spec", machine, at_least=[(n, limit) for n, limit in at_least], notes=bench.notes
        )
    finally:
        torch.set_num_threads(threads)


class _Bench:
    """A model with its draft, an engine for each mode, and requests."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._options = options
        settings = load_settings(
            {
                "model.path": options.model,
                "model.device": options.device,
                "speculation.draft_model": options.draft,
                "engine.max_sequences": max(options.batches),
                "engine.max_batch_tokens": 2048,
                "engine.prefix_cache": False,
                "engine.threads": options.threads,
                "worker.log_level": "error",
            }
        )
        self._model = build_model(settings)
        self.notes = (
            self._model.summary,
            f"{torch.get_num_threads()} CPU threads; ngram and draft draft {options.length} tokens",
        )
        self._engines = {mode: self._engine(mode) for mode in _MODES}
        self._auto_before: SpeculationStats | None = None
        self._texts = _texts()
        self.workloads: list[str] = []

    def compare(
        self, rounds: Rounds, number: int, name: str, requests: Sequence[EngineRequest]
    ) -> None:
        """All modes on these requests; a negative number warms up and is not counted."""
        rates: dict[str, float] = {}
        first = number % len(_MODES)
        for mode in (*_MODES[first:], *_MODES[:first]):
            began, wall = time.process_time(), time.perf_counter()
            tokens = _run(self._engines[mode], self._model, requests)
            cpu, wall = time.process_time() - began, time.perf_counter() - wall
            rates[mode] = tokens / (cpu if self._options.cpu_time else wall)
        if number < 0:
            return
        if name not in self.workloads:
            self.workloads.append(name)
        for mode, rate in rates.items():
            rounds.add(f"{mode}.{name}", rate)
        rounds.add(f"auto_vs_plain.{name}", rates["auto"] / rates["plain"])
        best = max(rates[mode] for mode in _MODES if mode != "auto")
        rounds.add(f"auto_vs_best.{name}", rates["auto"] / best)

    def documentation(self, number: int, count: int) -> list[EngineRequest]:
        """Requests to go on with pieces of documentation, greedily."""
        draw = random.Random(f"{number}/{count}")
        return self._requests(
            [self._passage(draw, 48) for _ in range(count)],
            SamplingOptions(max_tokens=self._options.tokens, temperature=0.0, ignore_eos=True),
        )

    def edits(self, number: int) -> list[EngineRequest]:
        """A text to be given again with a word exchanged here and there.

        What a model would say that edits is forced, token by token, by the only ids it may choose
        being those of the text, so that also a small model does it.
        """
        draw = random.Random(f"edit/{number}")
        prompt = self._passage(draw, 200)
        allowed = tuple(sorted(set(prompt)))
        options = SamplingOptions(
            max_tokens=self._options.tokens,
            temperature=0.0,
            ignore_eos=True,
            allowed_token_ids=allowed,
        )
        return self._requests([(*prompt, *prompt, *prompt[:24])], options)

    def hot(self, number: int) -> list[EngineRequest]:
        """Sampling at so high a temperature that nobody can guess."""
        draw = random.Random(f"hot/{number}")
        options = SamplingOptions(
            max_tokens=self._options.tokens, temperature=_HOT, ignore_eos=True
        )
        return self._requests([self._passage(draw, 48) for _ in range(4)], options)

    def acceptance(self) -> Iterable[tuple[str, float]]:
        """Of the drafts at each position, the share that was accepted, over all batch sizes."""
        for mode, source in (("ngram", Speculation.NGRAM), ("draft", Speculation.DRAFT)):
            stats = self._engines[mode].stats().speculation
            assert stats is not None
            for position in range(1, self._options.length + 1):
                drafted = stats.drafted.get((source, position), 0)
                if drafted:
                    accepted = stats.accepted.get((source, position), 0)
                    yield f"acceptance.{mode}.p{position}", accepted / drafted

    def _engine(self, mode: str) -> Engine:
        full = self._model.config.speculation
        assert full is not None
        fixed = self._options.length
        chosen: Mapping[str, SpeculationConfig | None] = {
            "plain": None,
            "ngram": dataclasses.replace(full, draft=False, length=fixed),
            "draft": dataclasses.replace(full, ngram=False, length=fixed),
            "auto": full,
        }
        config = dataclasses.replace(self._model.config, speculation=chosen[mode])
        return Engine(config, self._model.new_text_stream)

    def _passage(self, draw: random.Random, length: int) -> tuple[int, ...]:
        while True:
            ids = self._model.encode(draw.choice(self._texts))
            if len(ids) >= length:
                begin = draw.randrange(len(ids) - length + 1)
                return tuple(ids[begin : begin + length])

    def _requests(
        self, prompts: Sequence[tuple[int, ...]], options: SamplingOptions
    ) -> list[EngineRequest]:
        return [
            EngineRequest(
                id=f"r{index}",
                lane=Lane.NORMAL,
                tenant="bench",
                prompt_ids=prompt,
                options=options,
                seed=index,
                arrival=0.0,
            )
            for index, prompt in enumerate(prompts)
        ]


def _texts() -> list[str]:
    topics: Mapping[str, str] = pydoc_data.topics.topics
    return [text for _, text in sorted(topics.items()) if len(text) > 1500]


def _run(engine: Engine, model: ServingModel, requests: Sequence[EngineRequest]) -> int:
    """Generate them together; how many tokens came."""
    for request in requests:
        engine.add(request)
    tokens = 0
    while plan := engine.schedule():
        updates = engine.collect(plan, model.runner.run(plan))
        tokens += sum([len(update.token_ids) for update in updates])
    return tokens
