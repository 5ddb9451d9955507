"""A transport that sends a response's head and the first piece of its body in one write.

uvicorn writes them apart, and uvloop hands each write to the system at once. So a first event would
cost two packets, and wake its client for a useless head.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["HeldTransport"]


class HeldTransport(asyncio.Transport):
    """Another transport, behind one that can keep what is written for a moment.

    Args:
        inner: the connection's own.
    """

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._held: bytes | None = None

    def hold(self) -> None:
        """Keep what is written until :meth:`release`."""
        if self._held is None:
            self._held = b""

    def release(self) -> None:
        """Send what was kept, and keep no more; repeating it is harmless."""
        held, self._held = self._held, None
        if held:
            self._inner.write(held)

    def write(self, data: Any) -> None:
        """Write now, or keep it."""
        if self._held is None:
            self._inner.write(data)
        else:
            self._held += data

    def close(self) -> None:
        """Send what was kept first."""
        self.release()
        self._inner.close()

    def abort(self) -> None:
        """Drop what was kept."""
        self._held = None
        self._inner.abort()

    def is_closing(self) -> bool:
        """See :class:`asyncio.BaseTransport`."""
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        """See :class:`asyncio.ReadTransport`."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """See :class:`asyncio.ReadTransport`."""
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See :class:`asyncio.BaseTransport`."""
        return self._inner.get_extra_info(name, default)
