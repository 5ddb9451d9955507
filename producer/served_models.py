"""What is served on a Redis server: living workers, and the models they serve."""

from __future__ import annotations

from dataclasses import dataclass

from redis.exceptions import NoPermissionError

from penstock.shared.errors import InvalidRequest, ProtocolError
from penstock.shared.keys import Keys
from penstock.shared.protocol import ModelKind
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.vocabulary import unpack_vocabulary

__all__ = ["ModelCard", "count_workers", "find_served_models", "read_model_card"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What workers publish of the model they serve.

    Attributes:
        context: tokens of its longest sequence; None if no worker has said so.
        vocabulary: bytes of its tokens by id, None where there is none; empty if not known.
        kind: what it does with a request.
    """

    context: int | None
    vocabulary: tuple[bytes | None, ...]
    kind: ModelKind = ModelKind.GENERATE


_KEYS_PER_SCAN = 1000
_MAX_SCANS = 1000


async def count_workers(client: RetryingClient, keys: Keys) -> int:
    """How many workers of a shard hold a lease now.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """

    async def send() -> int:
        seconds, microseconds = await client.redis.time()
        now_ms = seconds * 1000 + microseconds // 1000
        count: int = await client.redis.zcount(keys.leases, f"({now_ms}", "+inf")
        return count

    return await client.call(send)


async def read_model_card(
    client: RetryingClient, keys: Keys, *, vocabulary: bool = True
) -> ModelCard:
    """What the workers of a shard published of their model.

    Args:
        client: the connection.
        keys: of the shard.
        vocabulary: whether that is wanted, too; it may be megabytes.

    Raises:
        ProtocolError: somebody else wrote it.
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """
    names = ["context", "kind", *(("vocabulary",) if vocabulary else ())]

    async def send() -> list[bytes | None]:
        values: list[bytes | None] = await client.redis.hmget(  # type: ignore[misc]
            keys.model_card, names
        )
        return values

    context, kind, *packed = await client.call(send)
    known = context is not None and context.isdigit()
    return ModelCard(
        context=int(context) if known and context else None,
        vocabulary=unpack_vocabulary(packed[0] or b"") if packed else (),
        kind=_kind(kind),
    )


def _kind(name: bytes | None) -> ModelKind:
    try:
        return ModelKind.GENERATE if name is None else ModelKind(name.decode())
    except ValueError:
        raise ProtocolError("kind", name, " or ".join(ModelKind)) from None


async def find_served_models(client: RetryingClient) -> list[Keys]:
    """The models and shards with a living worker; in a cluster, those of this node.

    It looks at the names of the first million keys.

    Returns:
        In order of model and shard; empty if this user may not list keys.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """

    async def send() -> list[str]:
        found: set[bytes] = set()
        cursor = 0
        for _ in range(_MAX_SCANS):
            cursor, names = await client.redis.scan(
                cursor, match="ps:{*}:leases", count=_KEYS_PER_SCAN
            )
            found.update(names)
            if not cursor:
                break
        return sorted(name.decode(errors="replace") for name in found)

    async def allowed() -> list[str]:
        try:
            return await send()
        except NoPermissionError:
            return []

    shards = [keys for name in await client.call(allowed) if (keys := _shard_of(name)) is not None]
    return [keys for keys in shards if await count_workers(client, keys)]


def _shard_of(leases: str) -> Keys | None:
    """The shard that a key of leases belongs to; None if the key is named otherwise."""
    model, _, shard = leases.removeprefix("ps:{").removesuffix("}:leases").rpartition(".")
    try:
        return Keys(model, int(shard))
    except (ValueError, InvalidRequest):
        return None
