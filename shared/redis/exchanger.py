"""What sends encoded commands together and returns their replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Exchanger"]


class Exchanger(ABC):
    """A connection that takes encoded commands, see :mod:`.resp`."""

    @abstractmethod
    async def exchange(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands together and return their replies; an error reply is returned, not raised.

        Args:
            commands: encoded, see :mod:`.resp`.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError: what the
                commands did is unknown.
        """
