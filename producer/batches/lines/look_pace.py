"""How long to wait between two looks at the lines in flight."""

from __future__ import annotations

__all__ = ["LookPace"]

_PAUSE_S = (0.02, 1.0)
_FIRST_S = 0.1
_WANTED_SHARE = (0.125, 0.25)
_STEP = 1.5


class LookPace:
    """A pause that follows the pace at which lines end.

    A look asks for the state of each line in flight, and what it finds costs two changes of the
    record. So an eighth to a quarter of the lines should end between two looks. The rest of them
    keeps the workers busy meanwhile.

    Attributes:
        pause_s: how long to wait before the next look, in seconds.
    """

    def __init__(self) -> None:
        self.pause_s = _FIRST_S

    def saw(self, ended: int, in_flight: int) -> None:
        """A look has found that so many of the lines in flight have ended."""
        few, many = _WANTED_SHARE
        shortest, longest = _PAUSE_S
        if ended < few * in_flight:
            self.pause_s = min(self.pause_s * _STEP, longest)
        elif ended > many * in_flight:
            self.pause_s = max(self.pause_s / _STEP, shortest)
