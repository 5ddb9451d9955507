"""Times the parts of a step from outside: no code of the product knows of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from penstock.gpu_worker.engine.output.text_stream import TextStream
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.program.native_decoder import NativeDecoder

__all__ = ["PartTimer", "TimedModel", "TimedText"]


class PartTimer:
    """Seconds by part of the step that runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Add to a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """What was added since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside the ``with``."""
        began = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - began)


class TimedText:
    """A detokeniser that is timed."""

    def __init__(self, stream: TextStream, timer: PartTimer) -> None:
        self._stream, self._timer = stream, timer

    def feed(self, token_id: int) -> str:
        """See :class:`TextStream`."""
        with self._timer.part("detokenise"):
            return self._stream.feed(token_id)

    def flush(self) -> str:
        """See :class:`TextStream`."""
        with self._timer.part("detokenise"):
            return self._stream.flush()


class TimedModel:
    """A loaded model whose forward is timed, and divided into linears, attention and the rest.

    The native library counts by itself. Of a model that torch computes, every linear layer is timed
    as it is called, and every attention module without the linear layers inside it.

    Args:
        loaded: the model.
        timer: is told.
    """

    def __init__(self, loaded: LoadedModel, timer: PartTimer) -> None:
        self._loaded, self._timer = loaded, timer
        self.began = self.ended = 0.0
        self._open: list[list[float]] = []
        if loaded.native is None:
            for module in loaded.model.modules():
                part = _part(module)
                if part is not None:
                    self._watch(module, part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def forward(self, step: Any, pool: Any, meanwhile: None = None) -> Tensor:
        """See :meth:`LoadedModel.forward`."""
        native = self._loaded.native
        before = dict(self._timer.seconds)
        self.began = time.perf_counter()
        logits = self._loaded.forward(step, pool, meanwhile)
        self.ended = time.perf_counter()
        if native is not None:
            self._add_native(native)
        known = sum(self._timer.seconds.values()) - sum(before.values())
        self._timer.add("other_ops", self.ended - self.began - known)
        return logits

    def _add_native(self, native: NativeDecoder) -> None:
        times = native.take_times()
        self._timer.add("linears", times["linear"] + times["experts"] + times["screen"])
        self._timer.add("attention", times["attention"])

    def _watch(self, module: nn.Module, part: str) -> None:
        def enter(*_: Any) -> None:
            self._open.append([time.perf_counter(), 0.0])

        def leave(*_: Any) -> None:
            began, inside = self._open.pop()
            passed = time.perf_counter() - began
            self._timer.add(part, passed - inside)
            if self._open:
                self._open[-1][1] += passed

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def _part(module: nn.Module) -> str | None:
    name = type(module).__name__
    if name.endswith("Linear"):
        return "linears"
    return "attention" if name.endswith("Attention") else None
