"""One way of drafting, measured at a batch size that stays the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.model.runner import ModelRunner

__all__ = ["Side", "alternate"]

_SLICE = 8
"""Steps that a side makes before the next one's turn. If the machine's speed comes and goes, all
sides have their share of it."""


class Side:
    """An engine that always runs a given number of sequences and replaces each that ends at once.

    A batch whose sequences only begin together shrinks, sooner with drafts than without: its last
    steps would be those of another batch size.

    Args:
        engine: the engine.
        runner: computes its steps; of this side alone, as it holds the KV.
        cpu_time: count CPU time of the process, not the clock's.
    """

    def __init__(self, engine: Engine, runner: ModelRunner, *, cpu_time: bool) -> None:
        self.engine = engine
        self._runner = runner
        self._cpu_time = cpu_time
        self._source: Iterator[EngineRequest] = iter(())
        self._count = 0
        self._live: dict[str, None] = {}
        self._tokens, self._seconds = 0, 0.0

    def turn_to(self, source: Iterator[EngineRequest], count: int) -> None:
        """Forget all sequences, and from now on keep ``count`` from ``source`` running."""
        for id in self._live:
            self.engine.abort(id)
        self._live.clear()
        self._source, self._count = source, count

    def begin(self) -> None:
        """Count from here on."""
        self._tokens, self._seconds = 0, 0.0

    @property
    def tokens(self) -> int:
        """Output tokens since :meth:`begin`."""
        return self._tokens

    @property
    def rate(self) -> float:
        """Tokens per second since then."""
        return self._tokens / self._seconds

    def advance(self) -> None:
        """Make some steps."""
        began = self._now()
        for _ in range(_SLICE):
            while len(self._live) < self._count:
                request = next(self._source)
                refused = self.engine.add(request)
                assert refused is None, refused
                self._live[request.id] = None
            step_began = time.perf_counter()
            plan = self.engine.schedule()
            assert plan is not None
            for update in self.engine.collect(plan, self._runner.run(plan)):
                self._tokens += len(update.token_ids)
                if update.finish is not None:
                    del self._live[update.id]
            self.engine.observe(plan, time.perf_counter() - step_began)
        self._seconds += self._now() - began

    def _now(self) -> float:
        if self._runner.loaded.device.type == "cuda":
            torch.cuda.synchronize(self._runner.loaded.device)
        return time.process_time() if self._cpu_time else time.perf_counter()


def alternate(sides: Sequence[Side], tokens: int) -> None:
    """Let each side generate ``tokens`` tokens, a slice of steps of each in turn."""
    for side in sides:
        side.begin()
    while behind := [side for side in sides if side.tokens < tokens]:
        for side in behind:
            side.advance()
