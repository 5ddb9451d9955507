"""The engine without Redis in a process of its own, for comparison with a worker."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Self

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.shared.errors import PenstockError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.settings import Settings

from .traces import Trace, requests_of

__all__ = ["EngineAlone"]

_START_TIMEOUT_S = 300.0


class EngineAlone:
    """Generates a trace again and again until the ``with`` ends.

    Args:
        settings: of the model and its engine.
        trace: what to generate.

    Attributes:
        pid: its process, which the caller may stop and continue.
    """

    def __init__(self, settings: Settings, trace: Trace) -> None:
        context = multiprocessing.get_context("spawn")
        self._tokens: Synchronized[int] = context.Value("q", 0)
        self._ready = context.Event()
        line = settings.model_dump_json()
        self._process = context.Process(
            target=_generate, args=(line, trace, self._tokens, self._ready), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._ready.wait(0.1):
            if not self._process.is_alive() or time.monotonic() > deadline:
                raise PenstockError("the engine to compare with did not start")
        assert self._process.pid is not None
        self.pid = self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def tokens(self) -> int:
        """Tokens it has generated."""
        # Without a lock: a stopped writer might hold it.
        return self._tokens.get_obj().value


def _generate(line: str, trace: Trace, tokens: Synchronized[int], ready: Event) -> None:
    from penstock.gpu_worker.model.build import build_model

    model, count = build_model(Settings.model_validate_json(line)), tokens.get_obj()
    engine = Engine(model.config, model.new_text_stream)
    coming = itertools.chain.from_iterable(
        _orders(model, trace, f"turn-{turn}") for turn in itertools.count()
    )
    waiting = 0
    with calm_collector():
        while True:
            while waiting < 2 * model.config.max_sequences:  # some always wait
                engine.add(next(coming))
                waiting += 1
            plan = engine.schedule()
            assert plan is not None
            updates = engine.collect(plan, model.runner.run(plan))
            waiting -= sum(update.finish is not None for update in updates)
            count.value += sum(len(update.token_ids) for update in updates)
            ready.set()


def _orders(model: ServingModel, trace: Trace, name: str) -> Sequence[EngineRequest]:
    return [
        EngineRequest(
            id=request.id,
            lane=request.lane,
            tenant=request.tenant,
            prompt_ids=tuple(model.encode(request)),
            options=request.options,
            seed=request.seed,
            arrival=time.monotonic(),
        )
        for request in requests_of(trace, name)
    ]
