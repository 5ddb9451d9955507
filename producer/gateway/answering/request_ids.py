"""The ids of requests, which say through which endpoint they came."""

from __future__ import annotations

import uuid
from enum import StrEnum

__all__ = ["IdPrefix", "new_id", "other_ids"]


class IdPrefix(StrEnum):
    """What the ids of an endpoint's requests begin with."""

    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    RESPONSE = "resp_"
    EMBEDDING = "embd-"
    RERANK = "rerank-"
    CLASSIFICATION = "classify-"
    INFERENCE = "infer-"
    TOKENS = "tok-"


def new_id(prefix: IdPrefix, digest: str | None, number: int = 0) -> str:
    """An id: another one each time, or the same for the same digest of an Idempotency-Key.

    Args:
        prefix: of the endpoint.
        digest: of the key; None without one.
        number: of the request among those of one call.
    """
    name = prefix + (uuid.uuid4().hex if digest is None else digest)
    return f"{name}-{number}" if number else name


def other_ids(prefix: IdPrefix, digest: str) -> tuple[str, ...]:
    """The ids that the key would have had at other endpoints.

    Tokens of a prompt are asked for on the way to another answer, so these go with any.
    """
    if prefix is IdPrefix.TOKENS:
        return ()
    return tuple(one + digest for one in IdPrefix if one not in (prefix, IdPrefix.TOKENS))
