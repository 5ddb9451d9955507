"""A batch that fails is computed in halves, until each culprit is alone and fails by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.payload import pack_result
from penstock.shared.protocol.states import Reason

from ..engine.requests.engine_request import Finish

__all__ = ["Result", "failure_of", "run_in_halves"]

_log = logging.getLogger("penstock.worker")


class Result(NamedTuple):
    """What a model gave for one payload.

    Attributes:
        packed: ready to be sent.
        charged: what it is charged by its own word; None: what was estimated.
    """

    packed: bytes
    charged: int | None = None


def run_in_halves(
    infer: Callable[[list[Any]], object],
    payloads: Sequence[Any],
    charged: Callable[[Any], int] | None = None,
) -> list[Result | Finish]:
    """Compute a batch; if it fails as a whole, compute its halves.

    It fails as a whole if ``infer`` raises, or returns too few or too many results or none at all.
    A result that is an exception, or cannot be sent, fails by itself.

    Args:
        infer: maps payloads to as many results. With culprits in a batch it sees others again.
        payloads: at least one.
        charged: what a request is charged, as its result tells.

    Returns:
        For each payload the result, or why it failed.
    """
    try:
        results = _listed(infer(list(payloads)), len(payloads))
    # asyncio's is no Exception, but a blocking infer that runs a loop of its own may raise it.
    except (Exception, asyncio.CancelledError) as error:
        if len(payloads) == 1:
            return [failure_of(error)]
        middle = len(payloads) // 2
        _log.info("a batch of %d fails (%r); computing its halves", len(payloads), error)
    else:
        return [_packed(result, charged) for result in results]
    first = run_in_halves(infer, payloads[:middle], charged)
    return first + run_in_halves(infer, payloads[middle:], charged)


def failure_of(error: BaseException) -> Finish:
    """How a request ends that makes the model raise this.

    A ``ValueError`` says that the payload is wrong. Whatever else is raised is the model's.
    """
    if isinstance(error, InvalidRequest):
        return Finish(Reason.INVALID, str(error))
    if not isinstance(error, ValueError):
        _log.error("a request fails in the batcher: %s", error, exc_info=error)
    reason = Reason.INVALID if isinstance(error, ValueError) else Reason.ENGINE_ERROR
    if isinstance(error, MemoryError):
        reason = Reason.OUT_OF_MEMORY
    first = (str(error).splitlines() or [""])[0]
    return Finish(reason, f"{type(error).__name__}: {first[:300]}")


def _listed(results: object, count: int) -> list[Any]:
    """The results as a list of the right length."""
    if not isinstance(results, Iterable) or isinstance(results, str | bytes | Mapping):
        raise TypeError(f"infer returned a {type(results).__name__}; allowed: a list of results")
    listed = list(results)
    if len(listed) != count:
        raise TypeError(f"infer returned {len(listed)} results for {count} items")
    return listed


def _packed(result: object, charged: Callable[[Any], int] | None) -> Result | Finish:
    if isinstance(result, BaseException):
        return failure_of(result)
    try:
        return Result(pack_result(result), None if charged is None else charged(result))
    except ValueError as error:  # the model's fault, not the payload's
        return Finish(Reason.ENGINE_ERROR, str(error))
