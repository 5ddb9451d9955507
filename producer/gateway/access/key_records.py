"""An API key: its secret, and what it allows. Redis holds the secret's SHA-256 and no more."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import Keys
from penstock.shared.protocol.request import check_tenant
from penstock.shared.protocol.states import Lane

__all__ = ["KeyRecord", "Limits", "digest_of", "new_secret"]

_PREFIX = "sk-penstock-"
_MOST = 2**40
_MAX_MODELS = 100
_MAX_LABEL = 100


def new_secret() -> str:
    """A secret of 256 random bits, in a form that scanners for leaked secrets can know."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """SHA-256 of a secret in hex. It needs no salt and no slow hash: the secret is random."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one key; 0 stands for none.

    Attributes:
        requests_per_minute: requests in any 60 seconds.
        tokens_per_minute: tokens in any 60 seconds.
        concurrent: requests that run at the same time.
        tokens_per_day: tokens in a day of UTC.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    tokens_per_day: int = 0


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is known of a key.

    Attributes:
        id: its public name, in logs and lists.
        tenant: who pays.
        label: for people.
        models: the models it may use; None for all.
        lanes: the lanes it may use.
        limits: its bounds.
        admin: it sees the usage of all tenants.
        created_at: ms of Redis' clock.
        expires_at: the same; None for never.
        revoked_at: the same; None if it is in force.
    """

    id: str
    tenant: str
    label: str = ""
    models: frozenset[str] | None = None
    lanes: frozenset[Lane] = frozenset(Lane)
    limits: Limits = Limits()
    admin: bool = False
    created_at: int = 0
    expires_at: int | None = None
    revoked_at: int | None = None

    def check(self) -> KeyRecord:
        """Itself, if its fields are in range.

        Raises:
            InvalidRequest: one is not.
        """
        check_tenant(self.tenant)
        if len(self.label) > _MAX_LABEL or not self.label.isprintable():
            raise InvalidRequest("label", self.label, f"at most {_MAX_LABEL} printable characters")
        if self.models is not None and not 1 <= len(self.models) <= _MAX_MODELS:
            raise InvalidRequest("models", sorted(self.models), f"1 to {_MAX_MODELS} names")
        for name in self.models or ():
            Keys(name)
        if not self.lanes:
            raise InvalidRequest("lanes", [], "at least one of critical, normal, batch")
        for name in Limits.__dataclass_fields__:
            value = getattr(self.limits, name)
            if not 0 <= value <= _MOST:
                raise InvalidRequest(name, value, f"0 to {_MOST}")
        return self

    def is_valid(self, now_ms: int) -> bool:
        """Whether it is in force at a time."""
        return self.revoked_at is None and (self.expires_at is None or now_ms < self.expires_at)

    def with_times(self, created_at: int, expires_at: int | None) -> KeyRecord:
        """The same with these times."""
        return replace(self, created_at=created_at, expires_at=expires_at)

    def fields(self) -> dict[str, str | int]:
        """The hash in Redis. A field that is not there is empty."""
        values: dict[str, str | int] = {
            "id": self.id,
            "tenant": self.tenant,
            "label": self.label,
            "lanes": " ".join(sorted(self.lanes)),
            "admin": int(self.admin),
            "created_at": self.created_at,
            **{name: getattr(self.limits, name) for name in Limits.__dataclass_fields__},
        }
        if self.models is not None:
            values["models"] = " ".join(sorted(self.models))
        if self.expires_at is not None:
            values["expires_at"] = self.expires_at
        if self.revoked_at is not None:
            values["revoked_at"] = self.revoked_at
        return values

    @classmethod
    def read(cls, raw: Mapping[bytes, bytes]) -> KeyRecord | None:
        """The record in a hash; None if there is none, or it was damaged by hand."""
        values = {
            name.decode(errors="replace"): v.decode(errors="replace") for name, v in raw.items()
        }
        try:
            return cls(
                id=values["id"],
                tenant=values["tenant"],
                label=values.get("label", ""),
                models=frozenset(values["models"].split()) if "models" in values else None,
                lanes=frozenset(map(Lane, values["lanes"].split())),
                limits=Limits(
                    **{name: int(values.get(name, 0)) for name in Limits.__dataclass_fields__}
                ),
                admin=values.get("admin") == "1",
                created_at=int(values["created_at"]),
                expires_at=int(values["expires_at"]) if "expires_at" in values else None,
                revoked_at=int(values["revoked_at"]) if "revoked_at" in values else None,
            )
        except (KeyError, ValueError):
            return None
