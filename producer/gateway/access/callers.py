"""Callers: what the rest of the gateway knows of a client, and access without keys."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Lane

from ..api_errors import ApiError, invalid

__all__ = ["Access", "Admission", "Caller", "OpenAdmission", "Used", "tokens_of"]

_MAX_KEY_CHARS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client.

    Attributes:
        tenant: who pays; its requests are its own, no other tenant can see them.
        key_id: which API key; empty without one.
        models: the models it may use; None for all.
        lanes: the lanes it may use.
        admin: it sees the usage of all tenants.
        digest: of the key's secret.
    """

    tenant: str
    key_id: str = ""
    models: frozenset[str] | None = None
    lanes: frozenset[Lane] = frozenset(Lane)
    admin: bool = False
    digest: str = field(default="", repr=False)

    def check(self, model: str, lane: Lane) -> None:
        """See that it may use a model and a lane.

        Raises:
            ApiError: 403, it may not.
        """
        if self.models is not None and model not in self.models:
            message = f"this API key may not use the model {model!r}"
            raise ApiError(403, message, "model_not_allowed", param="model")
        if lane not in self.lanes:
            message = f"this API key may not use the lane {lane.value}"
            raise ApiError(403, message, "tier_not_allowed", param="service_tier")

    def id_of(self, key: str) -> str:
        """The same id for the same Idempotency-Key of the same tenant, and no other.

        Raises:
            ApiError: 400, the key is empty or too long.
        """
        if not 1 <= len(key) <= _MAX_KEY_CHARS:
            raise invalid(None, f"Idempotency-Key: 1 to {_MAX_KEY_CHARS} characters")
        return hashlib.sha256(f"{self.tenant}\0{key}".encode()).hexdigest()[:32]


Used = Callable[[], Awaitable[int | None]]
"""Asks how many tokens a request has used; None while it has not ended."""


def tokens_of(end: End) -> int:
    """What a request that has ended has used of its key's tokens."""
    usage = end.usage
    return usage.prompt_tokens + usage.output_tokens if usage else end.n


class Admission(Protocol):
    """The permission for one request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What the response says of limits."""

    def bind(self, used: Used) -> None:
        """The request was submitted, and has used this; unbound it does not count."""

    async def release(self) -> None:
        """The client waits no longer; repeating the call is harmless.

        A request that goes on counts as running until it has ended.
        """


class Access(Protocol):
    """Who a client is, and whether it may submit now."""

    async def connect(self) -> None:
        """Begin; in the event loop that uses it."""

    async def aclose(self) -> None:
        """End."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Identify the caller.

        Raises:
            ApiError: 401, no valid key.
        """

    async def admit(
        self, caller: Caller, cost: int, request_id: str, *, joins: bool = False
    ) -> Admission:
        """Let a request of about ``cost`` tokens in.

        Args:
            caller: the client that asks.
            cost: estimated tokens.
            request_id: its id, by which any gateway finds what it has used.
            joins: it joins a request that was charged: no limit holds it back, and none is used.

        Raises:
            ApiError: 429, a limit of the key is reached.
        """


@dataclass(frozen=True, slots=True)
class OpenAdmission:
    """The permission where nothing is limited."""

    headers: Mapping[str, str] = field(default_factory=dict)

    def bind(self, used: Used) -> None:
        """Nothing counts."""

    async def release(self) -> None:
        """Nothing is held."""
