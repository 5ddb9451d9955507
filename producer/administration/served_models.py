"""What is served on a Redis server: living workers, and the models they serve."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.shared.errors import ProtocolError
from penstock.shared.keys import Keys
from penstock.shared.protocol.states import ModelKind
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.vocabulary import unpack_vocabulary

from .shards_found import find_shards

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

    Returns:
        In order of model and shard; empty if this user may not list keys.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """
    found = await find_shards(client, "leases")
    return [keys for keys in found if await count_workers(client, keys)]
