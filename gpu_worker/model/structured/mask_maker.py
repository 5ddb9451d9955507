"""Makes the masks of constraints beside the forward pass, and does not wait for slow ones.

The mask for a sequence's next token depends on its tokens so far alone. So a few threads make it
(llguidance releases the interpreter lock) while the device computes the logits. A sequence with
drafts needs one more mask for each of them; they are made together. Sampling then waits for missing
masks, but only for a short time and once. A sequence whose masks are late samples nothing in this
step: it is *deferred*. Each later step looks again and does not wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

from penstock.shared.protocol.states import Reason

from ...engine.requests.engine_request import Finish
from .constraint_state import ConstraintFollower
from .matcher import ConstraintError

__all__ = ["Asked", "Constrained", "MaskMaker", "Masks"]

_ALONE_S = 0.05
"""How long a step waits if no other sequence would sample: it has nothing better to do."""


class Constrained(Protocol):
    """What is read of a sequence."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them are the prompt."""

    @property
    def constraint(self) -> object | None:
        """A :class:`ConstraintFollower`; None for a sequence without a constraint."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Masks that a step needs of one sequence.

    Attributes:
        row: its position among the sequences that sample.
        follower: of its constraint.
        count: one for the next token, and one for each of its drafts.
    """

    row: int
    follower: ConstraintFollower
    count: int


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of one step; rows are positions among the sequences that sample.

    Attributes:
        tensors: int32 ``[words]`` each, in the order of the requests; empty masks for missing ones.
        deferred: rows whose mask is not ready yet.
        failures: rows whose output cannot continue.
    """

    tensors: tuple[Tensor, ...] = ()
    deferred: frozenset[int] = frozenset()
    failures: dict[int, Finish] = field(default_factory=dict)


@dataclass(slots=True)
class _Job:
    follower: ConstraintFollower
    token_ids: list[int]
    drafts: tuple[int, ...]


class MaskMaker:
    """A few threads that make masks, started for the first sequence that needs one.

    Args:
        num_threads: number of threads.
        wait_s: how long a step waits, once its forward pass is queued, for masks it has asked for.
        limit_s: seconds a thread may take for a mask; more ends the request.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        num_threads: int = 2,
        *,
        wait_s: float = 0.002,
        limit_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_threads = num_threads
        self._wait_s = wait_s
        self._limit_s = limit_s
        self._clock = clock
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[ConstraintFollower] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(
        self, sequences: Sequence[Constrained], drafts: Iterable[tuple[int, ...]] | None = None
    ) -> list[Asked]:
        """Ask for the masks of these sequences' next tokens. Call it before the forward.

        Args:
            sequences: those that sample.
            drafts: of each of them; None: there are no drafts. A sequence that is
                :attr:`~ConstraintFollower.busy` has none.

        Returns:
            What :meth:`join` takes, for the constrained sequences in order.
        """
        self._collect()
        asked: list[Asked] = []
        of_all = repeat(()) if drafts is None else drafts
        for row, (sequence, mine) in enumerate(zip(sequences, of_all, strict=False)):
            follower = sequence.constraint
            if follower is None:
                continue
            assert isinstance(follower, ConstraintFollower)
            asked.append(Asked(row, follower, 1 + len(mine)))
            if not follower.busy:
                self._ask(follower, sequence, mine)
        return asked

    def join(self, asked: Sequence[Asked], *, others: bool) -> Masks:
        """Take the masks that are ready, or become ready within the time a step may wait.

        Args:
            asked: what :meth:`begin` returned.
            others: whether other sequences sample in this step, too.
        """
        if not asked:
            return Masks()
        self._collect()
        followers = {of.row: of.follower for of in asked}
        fresh = {id(f) for f in followers.values() if f.busy and not f.late}
        self._wait(fresh, self._wait_s)
        if not others and all(follower.busy for follower in followers.values()):
            self._wait({id(f) for f in followers.values()}, _ALONE_S, enough=1)
        now, deferred, failures = self._clock(), set(), {}
        for row, follower in followers.items():
            if follower.busy:
                follower.late = True
                if now - follower.began > self._limit_s:
                    failures[row] = _too_slow(follower, self._limit_s)
                else:
                    deferred.add(row)
            elif follower.error is not None:
                failures[row] = _ended_by(follower)
        tensors = tuple(mask for of in asked for mask in of.follower.state.masks(of.count))
        return Masks(tensors, frozenset(deferred), failures)

    def close(self) -> None:
        """End the threads, each after its present mask."""
        for _ in self._threads:
            self._jobs.put(None)

    def _ask(
        self, follower: ConstraintFollower, sequence: Constrained, drafts: tuple[int, ...]
    ) -> None:
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        follower.late = False
        made = follower.num_followed == num_output and drafts == follower.drafts[: len(drafts)]
        if made or follower.error is not None:
            return  # the step before deferred it or failed
        begin = sequence.num_prompt_tokens + max(follower.num_followed, 0)
        follower.num_followed, follower.drafts = num_output, drafts
        follower.busy, follower.began = True, math.inf
        if not self._threads:
            self._start()
        self._jobs.put(_Job(follower, sequence.token_ids[begin:], drafts))

    def _collect(self) -> None:
        """Take note of the jobs that the threads have finished."""
        while self._threads:
            try:
                self._done.get_nowait().busy = False
            except Empty:
                return

    def _wait(self, awaited: set[int], seconds: float, *, enough: int | None = None) -> None:
        """Wait until all of these (or ``enough`` of them) are done, at most this long."""
        missing = 0 if enough is None else len(awaited) - enough
        deadline = self._clock() + seconds
        while len(awaited) > missing:
            try:
                follower = self._done.get(timeout=max(0.0, deadline - self._clock()))
            except Empty:
                return
            follower.busy = False
            awaited.discard(id(follower))

    def _start(self) -> None:
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._work, name=f"masks-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            follower, began = job.follower, time.thread_time()
            follower.began = self._clock()
            try:
                follower.state.fill(job.token_ids, job.drafts)
            except Exception as error:
                follower.error = error
            follower.seconds = (time.thread_time() - began) / (1 + len(job.drafts))
            self._done.put(follower)


def _too_slow(follower: ConstraintFollower, limit_s: float) -> Finish:
    field = follower.state.field
    return Finish(
        Reason.INVALID,
        f"{field}: what may follow was not known after {limit_s:g} s: simplify it",
    )


def _ended_by(follower: ConstraintFollower) -> Finish:
    if isinstance(follower.error, ConstraintError):
        return Finish(Reason.INVALID, f"{follower.state.field}: {follower.error}")
    return Finish(Reason.ENGINE_ERROR, f"{follower.state.field}: {follower.error!r}"[:300])
