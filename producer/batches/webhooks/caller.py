"""Makes webhook calls, and refuses addresses behind the firewall.

An address is resolved once, checked, and connected to; the name is only used for TLS and the Host
header. So a name whose address changes between check and call (DNS rebinding) gains nothing.
Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

import httpx

from .deliveries import CallFailed, Delivery
from .public_address import is_public

__all__ = ["WebhookCaller"]

_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 1 << 16


class WebhookCaller:
    """Calls webhooks.

    Args:
        keys: what calls are signed with; see :func:`.deliveries.signing_keys`.
        allow_private: also call addresses that are not public.
        on_call: told of each attempt whether it succeeded.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        *,
        allow_private: bool,
        on_call: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._keys = keys
        self._allow_private = allow_private
        self._on_call = on_call
        # Made once: it reads all certificates, for 20 ms in which the loop stands still.
        self._trust = httpx.create_ssl_context(trust_env=False)

    async def call(self, delivery: Delivery) -> None:
        """Make one attempt.

        Raises:
            CallFailed: the address is not allowed, cannot be reached, or did not answer 2xx.
        """
        try:
            await self._call(delivery)
        except CallFailed:
            self._on_call(False)
            raise
        self._on_call(True)

    async def _call(self, delivery: Delivery) -> None:
        try:
            url = httpx.URL(delivery.url)
            host = url.host
        except (httpx.InvalidURL, UnicodeError) as error:  # a host that IDNA does not allow
            raise CallFailed(f"the URL cannot be called: {error}"[:500]) from None
        address = await self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        headers = {**delivery.headers(self._keys, int(time.time())), "host": url.netloc.decode()}
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                httpx.AsyncClient(
                    verify=self._trust, timeout=_TIMEOUT_S, trust_env=False
                ) as client,
                client.stream(
                    "POST",
                    url.copy_with(host=address),
                    content=delivery.body.encode(),
                    headers=headers,
                    extensions={"sni_hostname": host},
                ) as answer,
            ):
                read = 0
                async for chunk in answer.aiter_raw():
                    read += len(chunk)
                    if read > _MAX_ANSWER_BYTES:
                        raise CallFailed(f"the answer is over {_MAX_ANSWER_BYTES} bytes")
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}"[:500]) from None
        if not 200 <= answer.status_code < 300:
            raise CallFailed(f"the answer has status {answer.status_code}")

    async def _resolve(self, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise CallFailed(f"{host} cannot be resolved: {error}") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not self._allow_private:
            for address in addresses:
                if not is_public(address):
                    raise CallFailed(
                        f"{host} has the address {address}, which is not public; "
                        "batches.webhook_private allows it"
                    )
        return addresses[0]
