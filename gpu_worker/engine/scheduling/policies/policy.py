"""What the scheduler asks of an order of admission."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from penstock.shared.protocol.states import Lane

from ...sequence import Sequence

__all__ = ["Policy"]


class Policy(ABC):
    """The queue of waiting sequences, and the order in it.

    Three things hold for every order:

    - The scheduler looks only at the first (:meth:`peek`). When that one does not fit, no other
      overtakes it: small requests do not starve a large one.
    - *Bounded overtaking*, among sequences of a lane that wait for their first admission: none is
      admitted before one that arrived more than ``max_overtake_s`` earlier. Only finitely many
      arrive in that time, and every running sequence ends. So no sequence starves behind its own
      lane. (With ``edf`` a deadline takes the place of the bound, and ``fair`` bounds for how long
      a tenant waits for its turn.)
    - No method but iteration takes time in proportion to the number of waiting sequences. So the
      passage of time must not change their order. So ageing is a constant in each key (see
      ``ranked``), never a sum made anew.

    In every order preempted sequences go before all others of their lane. They were admitted first,
    so no newcomer gets the KV blocks that they lost.
    """

    @abstractmethod
    def add(self, sequence: Sequence) -> None:
        """A new sequence."""

    @abstractmethod
    def put_back(self, sequence: Sequence) -> None:
        """A preempted one: it goes before all others of its lane."""

    @abstractmethod
    def peek(self) -> Sequence | None:
        """The sequence to admit next; None if none waits."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """A waiting one leaves: it was aborted."""

    def admit(self, sequence: Sequence) -> None:
        """The one that :meth:`peek` gave was admitted."""
        self.remove(sequence)

    def end(self, sequence: Sequence) -> None:  # noqa: B027 - most orders do not look back
        """An admitted one has ended."""

    def elapse(self, seconds: float) -> None:  # noqa: B027 - most orders know no time
        """A step took so long."""

    def may_displace(self, head: Sequence, runs: Sequence) -> bool:
        """Whether ``runs``, preempted for ``head``, would wait behind it.

        If not, what was taken from it would be given back to it in the same step.
        """
        return head.rank < runs.rank

    @abstractmethod
    def num_waiting(self, lane: Lane) -> int:
        """How many wait in this lane."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, for checks."""
