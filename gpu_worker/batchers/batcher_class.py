"""The class that a batcher serves, a user's own or a built-in one, behind one interface."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol.states import ModelKind

from .loop_thread import LoopThread

__all__ = ["ServedBatcher", "load_batcher", "serve_class"]


def _one(item: Any) -> int:
    del item
    return 1


def _same(item: Any) -> Hashable:
    del item
    return None


def _unused(beat: Callable[[], None]) -> None:
    del beat


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ServedBatcher:
    """A model that maps a list of payloads to a list of results.

    Attributes:
        infer: blocks; what it returns is checked by the caller.
        kind: what it does with a payload.
        summary: one line for the log.
        fingerprint: two models that may give different results have different ones.
        cost: an item's share of a batch, before it is computed.
        key: what items of one batch have in common.
        charged: what a request is charged, in the units of ``cost``, as its result tells; None: its
            cost.
        max_cost: of a batch, unless a setting says otherwise; None: no bound.
        context: tokens of the longest input; 0 for a model that knows no tokens.
        on_pass: gets what to call between the passes of a long batch: a sign of life.
        close: nothing more is inferred.
        concurrent: ``infer`` may be called again while it runs, in another thread.
    """

    infer: Callable[[list[Any]], object]
    kind: ModelKind
    summary: str
    fingerprint: str
    cost: Callable[[Any], int] = _one
    key: Callable[[Any], Hashable] = _same
    charged: Callable[[Any], int] | None = None
    max_cost: int | None = None
    context: int = 0
    on_pass: Callable[[Callable[[], None]], None] = _unused
    close: Callable[[], None] = _nothing
    concurrent: bool = False


def load_batcher(target: str) -> ServedBatcher:
    """Import ``module:Name``, make an object of it, and have it load.

    Raises:
        ConfigurationError: there is no such class, or its methods are not those of a batcher.
    """
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise ConfigurationError(f"batcher.target: got {target!r}; allowed: module:Name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"batcher.target {target}: the module cannot be imported ({error}); install it, or "
            "start the worker in the directory where it is"
        ) from error
    made = getattr(module, name, None)
    if not callable(made):
        raise ConfigurationError(f"batcher.target {target}: {module_name} has no class {name}")
    digest = hashlib.sha256(f"{target} {getattr(made, 'version', '')}".encode()).hexdigest()
    return serve_class(
        made(), ModelKind.BATCH, summary=f"batcher {target}", fingerprint=digest[:16]
    )


def serve_class(model: Any, kind: ModelKind, *, summary: str, fingerprint: str) -> ServedBatcher:
    """Have an object of a user's class load, and give it the interface of a batcher.

    Args:
        model: has ``infer(items) -> results``, blocking or asynchronous, and may have ``load()``,
            ``cost(item)`` and ``key(item)``.
        kind: what it does with a payload.
        summary: one line for the log.
        fingerprint: of the model.

    Raises:
        ConfigurationError: it has no ``infer``.
    """
    if not callable(getattr(model, "infer", None)):
        raise ConfigurationError(
            f"{summary}: {type(model).__name__} has no method infer(items), which maps a list of "
            "payloads to a list of results"
        )
    loop = LoopThread()
    try:
        if (load := getattr(model, "load", None)) is not None:
            _finished(load(), loop)
    except BaseException:
        loop.close()
        raise

    def infer(items: list[Any]) -> object:
        return _finished(model.infer(items), loop)

    return ServedBatcher(
        infer=infer,
        cost=getattr(model, "cost", _one),
        key=getattr(model, "key", _same),
        kind=kind,
        summary=summary,
        fingerprint=fingerprint,
        close=loop.close,
        concurrent=inspect.iscoroutinefunction(model.infer),
    )


def _finished(result: object, loop: LoopThread) -> object:
    """What a method returned, whether it is asynchronous or not."""
    return loop.run(result) if inspect.isawaitable(result) else result
