"""Webhook calls that have to be made, after the Standard Webhooks specification.

https://github.com/standard-webhooks/standard-webhooks: the headers ``webhook-id``,
``webhook-timestamp`` and ``webhook-signature``, signed by HMAC-SHA256.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.shared.errors import ConfigurationError

from ..stores.records import Batch

__all__ = ["RETRY_AFTER_S", "CallFailed", "Delivery", "signature", "signing_keys"]

RETRY_AFTER_S = (5, 30, 120, 600, 3600, 6 * 3600, 24 * 3600)
"""Pauses between attempts, in seconds. After the last one a call is given up."""

_SECRET_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 24


class CallFailed(Exception):
    """An attempt to call a webhook failed; the message says why."""


class Delivery(BaseModel):
    """One call. Times are in seconds of the Unix epoch.

    Attributes:
        id: the call's id, which the receiver may use to drop repetitions.
        url: where it goes.
        body: what is sent, JSON.
        due_at: when the next attempt is due.
        attempts: how many failed.
        error: why the last one failed.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    url: str
    body: str
    due_at: int
    attempts: int = 0
    error: str = ""

    @classmethod
    def of_batch(cls, batch: Batch) -> Delivery | None:
        """The call at the end of a batch; None if the batch names no webhook."""
        if batch.webhook is None:
            return None
        ended_at = batch.times[batch.state]
        return cls.of(batch.webhook, f"batch.{batch.state.value}", batch.id, ended_at)

    @classmethod
    def of(cls, url: str, event: str, subject: str, now: int) -> Delivery:
        """The call about an event.

        Args:
            url: where it goes.
            event: the event's type, such as ``batch.completed``.
            subject: id of what it is about.
            now: when it happened.
        """
        call_id = f"evt_{hashlib.sha256(f'{event} {subject}'.encode()).hexdigest()[:32]}"
        body: dict[str, Any] = {
            "id": call_id, "object": "event", "created_at": now, "type": event,
            "data": {"id": subject},
        }  # fmt: skip
        return cls(id=call_id, url=url, body=json.dumps(body), due_at=now)

    def failed(self, error: str, now: int) -> Delivery | None:
        """The delivery after an attempt that failed; None if there will be no further one."""
        if self.attempts >= len(RETRY_AFTER_S):
            return None
        due = now + RETRY_AFTER_S[self.attempts]
        return self.model_copy(
            update={"attempts": self.attempts + 1, "error": error, "due_at": due}
        )

    def headers(self, keys: Iterable[bytes], now: int) -> dict[str, str]:
        """Headers of an attempt, signed by each key: receivers accept any, so keys can rotate."""
        return {
            "content-type": "application/json",
            "webhook-id": self.id,
            "webhook-timestamp": str(now),
            "webhook-signature": " ".join(signature(key, self.id, now, self.body) for key in keys),
        }


def signature(key: bytes, call_id: str, timestamp: int, body: str) -> str:
    """The signature, version 1: ``v1,`` and the HMAC-SHA256 of ``id.timestamp.body``, base64."""
    signed = f"{call_id}.{timestamp}.{body}".encode()
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def signing_keys(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """The keys in secrets, which are base64, with or without the prefix ``whsec_``.

    Raises:
        ConfigurationError: a secret is not base64, or has fewer than 24 bytes.
    """
    keys = []
    for secret in secrets:
        try:
            key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
        except ValueError:
            key = b""
        if len(key) < _MIN_SECRET_BYTES:
            raise ConfigurationError(
                "batches.webhook_secrets: a secret is whsec_ and at least "
                f"{_MIN_SECRET_BYTES} bytes in base64"
            )
        keys.append(key)
    return tuple(keys)
