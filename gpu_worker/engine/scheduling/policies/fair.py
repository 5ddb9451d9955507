"""``fair``: tenants in turns, by the tokens they were served."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from penstock.shared.protocol.states import BY_URGENCY, Lane

from ...sequence import Sequence
from .policy import Policy
from .removable_heap import RemovableHeap

__all__ = ["FairPolicy"]


class FairPolicy(Policy):
    """Lane by lane; inside a lane the tenant that was served least; inside a tenant by arrival.

    Every tenant has a virtual counter of tokens in each lane, and the tenant with the least is
    next. This is start-time fair queueing (Goyal et al., 1996; for tokens of LLMs, Sheng et al.,
    2024). Admission charges a request's prompt and all tokens that its sequences may give. Each
    sequence that ends pays back those that it did not give. (A dropped beam pays nothing back, as
    another takes its place. The end of the search pays for all.) So between two requests of a
    waiting tenant, any other gets at most the cost of the first one, and one request more.

    Counters are kept only while sequences wait: a tenant alone takes nothing from others, and owes
    nothing later. A tenant that comes when others wait starts at the counter that is being served,
    so no tenant saves up credit by staying away.

    That alone would let an endless line of new tenants pass one whose counter is high. So a tenant
    is *overdue* once a request arrives more than ``max_overtake_s`` after both its oldest one and
    its last turn. While a tenant is overdue, the counters decide only every second admission. The
    others go to the tenant that has waited longest for a turn. An overdue tenant waits for at
    most two admissions for each tenant that has waited longer, and one more. And one tenant's
    flood, however old, leaves the other half of the admissions to all.

    Args:
        max_overtake_s: see above; 0 serves by arrival.
    """

    def __init__(self, max_overtake_s: float) -> None:
        self._lanes = {lane: _Shares(max_overtake_s) for lane in BY_URGENCY}

    def add(self, sequence: Sequence) -> None:
        """Behind its tenant's others."""
        self._lanes[sequence.lane].add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """To the front of its lane; it was charged when it was first admitted."""
        self._lanes[sequence.lane].put_back(sequence)

    def peek(self) -> Sequence | None:
        """The next sequence of the most urgent lane that is not empty."""
        for shares in self._lanes.values():
            if (first := shares.first()) is not None:
                return first
        return None

    def admit(self, sequence: Sequence) -> None:
        """Its tenant is charged."""
        self._lanes[sequence.lane].admit(sequence)

    def remove(self, sequence: Sequence) -> None:
        """From wherever it stands in its lane."""
        self._lanes[sequence.lane].remove(sequence)

    def end(self, sequence: Sequence) -> None:
        """Its tenant is paid back what it did not give."""
        self._lanes[sequence.lane].refund(sequence)

    def num_waiting(self, lane: Lane) -> int:
        """How many wait in this lane."""
        return len(self._lanes[lane])

    def __iter__(self) -> Iterator[Sequence]:
        for shares in self._lanes.values():
            yield from shares


class _Shares:
    """One lane: its tenants, their counters and their waiting sequences."""

    def __init__(self, max_overtake_s: float) -> None:
        self._max_overtake_s = max_overtake_s
        self._returned: OrderedDict[Sequence, None] = OrderedDict()
        self._waiting: dict[str, RemovableHeap[Sequence]] = {}  # by tenant; no empty ones
        self._turns: RemovableHeap[str] = RemovableHeap()  # tenants that wait, by counter
        # The same by when they were last given a turn, or began to wait for one; and the former.
        self._since: RemovableHeap[str] = RemovableHeap()
        self._served: dict[str, float] = {}
        # Counters of tenants that do not wait, as far as they are above the floor.
        self._idle: RemovableHeap[str] = RemovableHeap()
        self._arrivals: RemovableHeap[Sequence] = RemovableHeap()
        self._latest = -math.inf
        self._counters_next = False  # the last admission was an overdue one's
        self._charged: dict[str, _Charge] = {}  # by request; of those that have not ended
        self._floor = 0.0  # the counter that is being served
        self._period = 0

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        own = self._waiting.get(tenant)
        if own is None:
            own = self._waiting[tenant] = RemovableHeap()
            counter = self._floor
            if tenant in self._idle:
                counter = max(counter, self._idle.key(tenant))
                self._idle.remove(tenant)
            self._turns.put(tenant, counter)
        own.put(sequence, sequence.arrival)
        self._arrivals.put(sequence, sequence.arrival)
        self._latest = max(self._latest, sequence.arrival)
        self._date(tenant)

    def put_back(self, sequence: Sequence) -> None:
        self._returned[sequence] = None
        self._returned.move_to_end(sequence, last=False)

    def first(self) -> Sequence | None:
        if self._returned:
            return next(iter(self._returned))
        if not self._max_overtake_s:
            return self._arrivals.first()
        tenant = self._turns.first() if self._overdue is None else self._overdue
        return None if tenant is None else self._waiting[tenant].first()

    @property
    def _overdue(self) -> str | None:
        """The tenant whose turn it is, whatever its counter."""
        tenant = self._since.first()
        if tenant is None or self._counters_next:
            return None
        return tenant if self._since.key(tenant) + self._max_overtake_s < self._latest else None

    def admit(self, sequence: Sequence) -> None:
        if sequence in self._returned:
            del self._returned[sequence]
            return
        tenant = sequence.tenant
        counter = self._turns.key(tenant)
        places, longest = sequence.options.num_sequences, sequence.options.max_tokens
        cost = sequence.num_prompt_tokens + longest * places
        self._charged[sequence.id] = _Charge(self._period, places)
        least = self._turns.first()
        assert least is not None
        self._floor = max(self._floor, self._turns.key(least))
        self._counters_next = self._overdue is not None
        self._turns.put(tenant, counter + cost)
        self._served[tenant] = self._latest
        self._leave(sequence)
        # Idle tenants that the floor has reached are like new ones.
        while (idle := self._idle.first()) is not None and self._idle.key(idle) <= self._floor:
            self._idle.remove(idle)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._returned:
            del self._returned[sequence]
            self.refund(sequence)
        else:
            self._leave(sequence)

    def refund(self, sequence: Sequence) -> None:
        charge = self._charged.get(sequence.id)
        if charge is None:
            return  # its request was never admitted
        is_over = not sequence.siblings
        unused = charge.refund(sequence, is_over=is_over)
        if is_over:
            del self._charged[sequence.id]
        if charge.period != self._period:
            return  # what it was charged is forgotten
        tenant = sequence.tenant
        for counters in (self._turns, self._idle):
            if tenant in counters:
                counters.put(tenant, counters.key(tenant) - unused)

    def _leave(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        own = self._waiting[tenant]
        own.remove(sequence)
        self._arrivals.remove(sequence)
        if len(own):
            self._date(tenant)
            return
        del self._waiting[tenant]
        self._since.remove(tenant)
        self._served.pop(tenant, None)
        counter = self._turns.key(tenant)
        self._turns.remove(tenant)
        if self._waiting:
            if counter > self._floor:
                self._idle.put(tenant, counter)
            return
        # The busy period ends.
        self._idle = RemovableHeap()
        self._floor, self._latest = 0.0, -math.inf
        self._counters_next = False
        self._period += 1

    def _date(self, tenant: str) -> None:
        oldest = self._waiting[tenant].first()
        assert oldest is not None
        self._since.put(tenant, max(oldest.arrival, self._served.get(tenant, -math.inf)))

    def __len__(self) -> int:
        return len(self._arrivals) + len(self._returned)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        yield from self._arrivals


class _Charge:
    """What the tenant of a running request may be paid back.

    Args:
        period: the busy period in which it was charged.
        places: sequences for which it was, each with ``max_tokens``.
    """

    __slots__ = ("_places", "period")

    def __init__(self, period: int, places: int) -> None:
        self.period = period
        self._places = places

    def refund(self, sequence: Sequence, *, is_over: bool) -> int:
        """A sequence has ended; the tokens that will not be given now.

        Args:
            sequence: of the request.
            is_over: no other sequence of it goes on.
        """
        longest, given = sequence.options.max_tokens, sequence.num_output_tokens
        if sequence.num_candidates:  # a beam: all that go on are as long
            return self._places * (longest - given) if is_over else 0
        self._places -= 1
        # When it is over, those that were never let go will not be, either.
        return longest - given + (self._places * longest if is_over else 0)
