"""Settings of workers whose model answers at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints

from .section import Section, setting

__all__ = ["BatcherSettings"]


_Target = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_]\w*$")]


class BatcherSettings(Section):
    """How a model that answers at once gathers requests into batches."""

    target: _Target | None = setting(
        None,
        "Class that a worker serves in place of a generating model, as `module:Name`; "
        "[batchers.md](batchers.md) says what it has. `off` serves `model.path`.",
        none="off",
    )
    max_batch: int = setting(
        32,
        "Most requests in one batch. A worker claims those of the batches that may run at once, "
        "and of one that gathers meanwhile.",
        unit="requests",
        ge=1,
        le=4096,
    )
    max_concurrent_batches: int = setting(
        1,
        "Most batches that run at once. More than one needs an `async def infer`, and pays where "
        "that waits for somebody else, such as a remote service.",
        unit="batches",
        ge=1,
        le=256,
    )
    max_batch_cost: int | None = setting(
        None,
        "Most cost in one batch, summed over its requests as the class's `cost` tells; a request "
        "that costs more is a batch by itself.",
        none="off",
        ge=1,
        le=10**12,
    )
    max_wait_ms: float = setting(
        5.0,
        "Longest time that a request waits for others, from its acceptance.",
        unit="ms",
        ge=0,
        le=60_000,
    )
    window: Literal["adaptive", "fixed"] = setting(
        "adaptive",
        "`adaptive` waits only while waiting pays, by the measured cost of a batch and the usual "
        "gap between two requests; `fixed` always waits for `max_wait_ms` or a full batch.",
    )
