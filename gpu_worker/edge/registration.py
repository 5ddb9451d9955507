"""Before its first claim, a worker says which model it serves, and may be refused.

Workers of one shard share its requests, so they must serve one model. While a model is exchanged
for another in a running fleet, streams keep to the workers of theirs; see ``claim.lua``.
"""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.shared.errors import PenstockError
from penstock.shared.scripts.operations import Operations
from penstock.shared.scripts.replies import accepted
from penstock.shared.scripts.script_loader import Command
from penstock.shared.settings import WorkerSettings

from ..messages import Ready

__all__ = ["ModelChangeRefused", "register_model"]

_log = logging.getLogger("penstock.edge")

_PAUSE_S = 0.2

_PATIENCE_LEASES = 1.5
"""The word of a fleet that was stopped just now counts for the rest of a lease."""


class ModelChangeRefused(PenstockError):
    """Workers of this shard serve another model; a restart would meet the same."""


async def register_model(
    operations: Operations, ready: Ready, worker: WorkerSettings, drain: asyncio.Event
) -> None:
    """Register the model, waiting for Redis and for a fleet that is about to be gone.

    Args:
        operations: of this worker, with its fingerprint.
        ready: what its engine says of the model.
        worker: its settings.
        drain: ends the waiting.

    Raises:
        ModelChangeRefused: another model is served here, and no rolling change was asked for.
        RedisUnavailable: the server refuses the script.
    """
    rolling = worker.model_change == "rolling"
    give_up_at = time.monotonic() + _PATIENCE_LEASES * worker.lease_ms / 1000
    while not drain.is_set():
        try:
            other = await operations.register(lease_ms=worker.lease_ms, rolling=rolling)
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            _log.warning("Redis did not answer (%s); trying again", error)
        else:
            if other is None:
                await _publish(operations, ready)
                return
            if time.monotonic() >= give_up_at:
                raise ModelChangeRefused(
                    f"workers of {operations.keys.prefix} serve another model (fingerprint "
                    f"{other}, this one's is {ready.fingerprint}); stop them, give this model "
                    "another name, or ask for a rolling change with worker.model_change = rolling"
                )
        await asyncio.sleep(_PAUSE_S)


async def _publish(operations: Operations, ready: Ready) -> None:
    """Tell readers of the model; a worker serves as well without."""
    card = Command(
        (
            "HSET", operations.keys.model_card,
            "context", str(ready.context), "vocabulary", ready.vocabulary,
            "kind", ready.kind.value, "summary", ready.summary,
        )
    )  # fmt: skip
    try:
        (reply,) = await operations.run([card])
        accepted("HSET", reply)
    except (RedisConnectionError, RedisTimeoutError, OSError, PenstockError) as error:
        _log.warning("the model's vocabulary could not be published: %s", error)
