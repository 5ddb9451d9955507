"""Access with API keys: identifies the caller, and checks the limits of its key."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping

from penstock.shared.errors import PenstockError
from penstock.shared.keys import GatewayKeys
from penstock.shared.local.embedded import require_url
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

from ..api_errors import ApiError
from .addresses import is_loopback, names_loopback
from .callers import Admission, Caller, OpenAdmission
from .key_records import KeyRecord, digest_of
from .key_store import KeyStore
from .limit_scripts import LimitScripts, Verdict
from .running_requests import Locate, RunningRequests, lease_of

__all__ = ["KeyAccess", "access_of", "are_keys"]

_FRESH_S = 1.0
"""How long a look at a key counts: a revoked key lists models that much longer. `admit` looks anew
at every request."""

_MOST_CACHED = 10_000
_MAX_SECRET_CHARS = 256


async def _nothing_is_known(_: str) -> None:
    """Where no requests can be looked for."""


class KeyAccess:
    """Asks Redis for every request, so that all gateways share each key's limits.

    Args:
        settings: the sections ``redis`` and ``gateway``.
        required: refuse callers without a key even while no key exists. (On a loopback address a
            gateway without any key admits all callers, until it has seen the first key.)
        scripts: makes the scripts' calls; tests put altered ones in their place.
        locate: finds requests of gateways that ended.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        required: bool,
        scripts: Callable[[RetryingClient], LimitScripts] = LimitScripts,
        locate: Locate = _nothing_is_known,
    ) -> None:
        gateway = settings.gateway
        self._client = RetryingClient(
            require_url(settings.redis),
            socket_timeout_s=settings.redis.socket_timeout_s,
            outage_s=gateway.outage_s,
        )
        self._store = KeyStore(self._client)
        self._scripts = scripts(self._client)
        self._lease_ms = gateway.admission_lease_ms
        self._required = required
        self._checked_at = float("-inf")
        self._cache: OrderedDict[str, tuple[float, KeyRecord | None]] = OrderedDict()
        self._running = RunningRequests(self._scripts, self._lease_ms, locate)

    async def connect(self) -> None:
        """Find the server, and begin to renew what runs here."""
        await self._client.connect(GatewayKeys().index)
        self._running.start()

    async def aclose(self) -> None:
        """End; see :meth:`RunningRequests.aclose`."""
        await self._running.aclose()
        await self._client.aclose()

    async def count(self) -> int:
        """How many keys there are, revoked ones included.

        Raises:
            RedisUnavailable: Redis is away.
        """
        return await self._store.count()

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """The tenant of the bearer key.

        Raises:
            ApiError: 401, there is none, or it is not in force; 403, it is not needed, but the
                request is for another host.
            RedisUnavailable: Redis is away.
        """
        secret = _secret(headers)
        record = await self._look_up(secret) if secret else None
        if record is None and await self._is_required():
            known = "the API key is not known, revoked or expired"
            raise _unauthorized(known if secret else "no API key: send `authorization: Bearer KEY`")
        if record is None:
            _check_host(headers)
            return Caller("default")
        return Caller(
            record.tenant, record.id, record.models, record.lanes, record.admin, digest_of(secret)
        )

    async def admit(
        self, caller: Caller, cost: int, request_id: str, *, joins: bool = False
    ) -> Admission:
        """See :class:`..callers.Access`.

        Raises:
            ApiError: 401, the key was revoked just now; 429, a limit is reached.
            RedisUnavailable: Redis is away.
        """
        if not caller.key_id:
            return OpenAdmission()
        lease = lease_of(request_id)
        verdict = await self._scripts.admit(
            caller.digest,
            caller.key_id,
            lease,
            cost=cost,
            lease_ms=self._lease_ms,
            charge=not joins,
        )
        if verdict.lapsed:
            self._running.claim(caller.key_id)
        if verdict.verdict == "full":
            raise _full(verdict, cost)
        if verdict.verdict != "ok":
            self._cache.pop(caller.digest, None)
            raise _unauthorized("the API key is not known, revoked or expired")
        if joins:
            return OpenAdmission(_limit_headers(verdict))
        return self._running.hold(caller.key_id, lease, _limit_headers(verdict))

    async def _look_up(self, secret: str) -> KeyRecord | None:
        """The record of a key in force; Redis is asked once a second."""
        digest, now = digest_of(secret), asyncio.get_running_loop().time()
        known = self._cache.get(digest)
        if known is None or now - known[0] > _FRESH_S:
            record = await self._store.find(secret)
            if record is not None:
                self._required = True
                if not record.is_valid(await self._store.now_ms()):
                    record = None
            known = now, record
            self._cache[digest] = known
            self._cache.move_to_end(digest)
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)
        return known[1]

    async def _is_required(self) -> bool:
        now = asyncio.get_running_loop().time()
        if not self._required and now - self._checked_at > _FRESH_S:
            asked_before, self._checked_at = self._checked_at, now  # others need not ask meanwhile
            try:
                self._required = await self._store.count() > 0
            except PenstockError:
                self._checked_at = asked_before
                raise
        return self._required


def access_of(settings: Settings, locate: Locate = _nothing_is_known) -> KeyAccess:
    """The access to a gateway: others than this machine always need a key."""
    required = not is_loopback(settings.gateway.host)
    return KeyAccess(settings, required=required, locate=locate)


async def are_keys(settings: Settings) -> bool:
    """Whether there is any API key.

    Raises:
        RedisUnavailable: Redis is away.
    """
    access = access_of(settings)
    try:
        await access.connect()
        return await access.count() > 0
    finally:
        await access.aclose()


def _secret(headers: Mapping[str, str]) -> str:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    secret = secret.strip()
    if kind.lower() != "bearer" or len(secret) > _MAX_SECRET_CHARS:
        return ""
    return secret


def _check_host(headers: Mapping[str, str]) -> None:
    """See that a request without a key was meant for this machine.

    A web page can have its own name resolve to a loopback address (DNS rebinding). Its browser
    takes that for the page's own server, but says the name.

    Raises:
        ApiError: 403, it was not.
    """
    host = headers.get("host")
    if host is not None and not names_loopback(host):
        message = (
            f"without API keys the gateway answers for localhost and loopback addresses only, and "
            f"not for {host[:100]!r}; `penstock keys create` makes a key"
        )
        raise ApiError(403, message, "host_not_allowed", retry=False)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, "invalid_api_key", retry=False)


_BOUNDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "concurrent requests",
    "budget": "tokens per day",
}


def _full(verdict: Verdict, cost: int) -> ApiError:
    what = _BOUNDS[verdict.bound]
    message = f"the limit of {what} of this API key is reached"
    if verdict.bound in ("tokens", "budget"):
        message += f"; this request is estimated at {cost} tokens"
    code = "insufficient_quota" if verdict.bound == "budget" else "rate_limit_exceeded"
    hopeless = verdict.bound == "budget" or (verdict.bound == "tokens" and cost > verdict.tokens)
    return ApiError(
        429, message, code, retry_after_s=-(-verdict.retry_ms // 1000),
        retry=False if hopeless else None, more_headers=_limit_headers(verdict),
    )  # fmt: skip


def _limit_headers(verdict: Verdict) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, limit, left, reset_ms in (
        ("requests", *verdict[3:6]),
        ("tokens", *verdict[6:9]),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
            headers[f"x-ratelimit-reset-{name}"] = f"{reset_ms}ms"
    return headers
