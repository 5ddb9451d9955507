"""Who calls: what the rest of the gateway knows of a client, and the door without keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.shared.protocol import Lane

__all__ = ["Access", "Admission", "Caller", "OpenAccess"]


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client.

    Attributes:
        tenant: who pays; its requests are its own, no other tenant can see them.
        key_id: which API key; empty without one.
        models: the models it may use; None for all.
        lanes: the lanes it may use.
    """

    tenant: str
    key_id: str = ""
    models: frozenset[str] | None = None
    lanes: frozenset[Lane] = frozenset(Lane)


class Admission(Protocol):
    """The permission for one request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What the response says of limits."""

    async def release(self) -> None:
        """The request has ended or was never submitted; repeating it is harmless."""


class Access(Protocol):
    """The door: who a client is, and whether it may submit now."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Say who calls.

        Raises:
            ApiError: 401, no valid key.
        """

    async def admit(self, caller: Caller, cost: int) -> Admission:
        """Let a request of about ``cost`` tokens in.

        Raises:
            ApiError: 429, a limit of the key is reached.
        """


@dataclass(frozen=True, slots=True)
class _Granted:
    headers: Mapping[str, str] = field(default_factory=dict)

    async def release(self) -> None:
        return None


class OpenAccess:
    """The door without keys: everybody is the tenant ``default``."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Everybody."""
        del headers
        return Caller("default")

    async def admit(self, caller: Caller, cost: int) -> Admission:
        """Always."""
        del caller, cost
        return _Granted()
