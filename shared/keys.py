"""Every Redis key and channel name of penstock, built in one place.

All names of one shard carry the hash tag ``{model.shard}``. So they live in one slot of a Redis
Cluster, and one script may touch them together. Scale Redis by shards, workers freely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import InvalidRequest
from .protocol.states import Lane

__all__ = ["GROUP", "BatchKeys", "GatewayKeys", "Keys"]

GROUP = "workers"
"""Name of the consumer group on every queue stream."""

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,95}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one shard of one model.

    Args:
        model: the served model's name, 1 to 96 characters of ``A-Z a-z 0-9 _ . / -``.
        shard: shard number, 0 or more.

    Raises:
        InvalidRequest: the model name or the shard is not as above.
    """

    model: str
    shard: int = 0
    prefix: str = field(init=False, repr=False, compare=False)
    """What every name of this shard begins with: ``ps:{model.shard}:``."""

    def __post_init__(self) -> None:
        if not _MODEL.fullmatch(self.model):
            allowed = "1 to 96 characters of A-Z a-z 0-9 _ . / -, starting with a letter or digit"
            raise InvalidRequest("model", self.model, allowed)
        if self.shard < 0:
            raise InvalidRequest("shard", self.shard, "an integer, 0 or more")
        object.__setattr__(self, "prefix", f"ps:{{{self.model}.{self.shard}}}:")

    def request(self, request_id: str) -> str:
        """Hash: the record of one request."""
        return f"{self.prefix}request:{request_id}"

    def log(self, request_id: str) -> str:
        """Stream: the token log, the truth about one request's output."""
        return f"{self.prefix}log:{request_id}"

    def channel(self, request_id: str) -> str:
        """Pub/sub channel: a low-latency copy of what is appended to the log."""
        return f"{self.prefix}events:{request_id}"

    def inbox(self, name: str) -> str:
        """Pub/sub channel: the same for all requests submitted with this inbox, together."""
        return f"{self.prefix}inbox:{name}"

    def queue(self, lane: Lane, tenant: str) -> str:
        """Stream with group :data:`GROUP`: fresh requests of one tenant in one lane."""
        return f"{self.prefix}queue:{lane.value}:{tenant}"

    def continued(self, lane: Lane) -> str:
        """Stream with group: requests of a lane to be continued by another worker; goes first."""
        return f"{self.prefix}continued:{lane.value}"

    @property
    def suspects(self) -> str:
        """Stream with group: requests that may have crashed a worker; one at a time."""
        return f"{self.prefix}suspects"

    def tenants(self, lane: Lane) -> str:
        """Sorted set: tenants with work in a lane, by virtual time in tokens."""
        return f"{self.prefix}tenants:{lane.value}"

    @property
    def lanes(self) -> str:
        """Sorted set: lanes by virtual time in weighted tokens."""
        return f"{self.prefix}lanes"

    @property
    def virtual_time(self) -> str:
        """Hash: virtual time last served, per lane and over the lanes."""
        return f"{self.prefix}virtual_time"

    @property
    def sweep(self) -> str:
        """Hash: what one sweep leaves for the next one."""
        return f"{self.prefix}sweep"

    @property
    def leases(self) -> str:
        """Sorted set: worker ids by the Redis time in ms at which their lease ends."""
        return f"{self.prefix}leases"

    def owned(self, worker_id: str) -> str:
        """Hash: request id to claim, for every request a worker owns."""
        return f"{self.prefix}owned:{worker_id}"

    @property
    def model_card(self) -> str:
        """Hash: what readers need to know of the served model: context length, vocabulary."""
        return f"{self.prefix}model"

    @property
    def fingerprints(self) -> str:
        """Sorted set: fingerprints of served models by when the last worker's word for it ends."""
        return f"{self.prefix}fingerprints"

    @property
    def deadlines(self) -> str:
        """Sorted set: ids of non-terminal requests by the Redis time in ms when they expire."""
        return f"{self.prefix}deadlines"

    @property
    def readers(self) -> str:
        """Sorted set: ids of requests that need a reader, by when their last one counts as gone."""
        return f"{self.prefix}readers"

    @property
    def ended(self) -> str:
        """Sorted set: ids of ended requests with logs to be made compact, by when they ended."""
        return f"{self.prefix}ended"

    def compacting(self, request_id: str) -> str:
        """Stream: a compact log while it is made, before it takes the place of the log."""
        return f"{self.prefix}compacting:{request_id}"

    @property
    def counters(self) -> str:
        """Hash: queued requests, tokens, bytes (total, per lane, per tenant), ends by state."""
        return f"{self.prefix}counters"

    def usage(self, day: int) -> str:
        """Hash: usage of the requests that ended on a day, in days of UTC since 1970."""
        return f"{self.prefix}usage:{day}"

    @property
    def bell(self) -> str:
        """Stream of one entry: wakes idle workers."""
        return f"{self.prefix}bell"

    def ingress(self, tenant: str | None = None) -> str:
        """Stream with group :data:`GROUP`: what plain clients add; one for all, one per tenant."""
        return f"{self.prefix}ingress" if tenant is None else f"{self.prefix}ingress:{tenant}"

    @property
    def ingress_tenants(self) -> str:
        """Set: tenants with an ingress stream of their own."""
        return f"{self.prefix}ingress_tenants"

    @property
    def dead_letters(self) -> str:
        """Stream, capped: requests that ended ``dead``."""
        return f"{self.prefix}dead_letters"


class BatchKeys:
    """Key names of batch files, webhooks and schedules: one slot of a cluster for all."""

    prefix = "ps:{batches}:"

    def batch(self, batch_id: str) -> str:
        """String: a batch's record, JSON."""
        return f"{self.prefix}batch:{batch_id}"

    def batches(self, tenant: str) -> str:
        """Sorted set: a tenant's batches by when they were created."""
        return f"{self.prefix}batches:{tenant}"

    @property
    def active(self) -> str:
        """Sorted set: batches that have not ended, by when they were created."""
        return f"{self.prefix}active"

    def tick(self, batch_id: str) -> str:
        """String with expiry: who drives a batch now."""
        return f"{self.prefix}tick:{batch_id}"

    def queued(self, batch_id: str) -> str:
        """String with expiry: a job that drives a batch waits for its turn."""
        return f"{self.prefix}queued:{batch_id}"

    def file(self, file_id: str) -> str:
        """String: a file's record, JSON."""
        return f"{self.prefix}file:{file_id}"

    def files(self, tenant: str) -> str:
        """Sorted set: a tenant's files by when they were created."""
        return f"{self.prefix}files:{tenant}"

    @property
    def file_expiry(self) -> str:
        """Sorted set: files by when they are deleted."""
        return f"{self.prefix}file_expiry"

    @property
    def leftovers(self) -> str:
        """Sorted set: files and folders that the storage is to be rid of, by when."""
        return f"{self.prefix}leftovers"

    def delivery(self, delivery_id: str) -> str:
        """String: a webhook call that has to be made, JSON."""
        return f"{self.prefix}delivery:{delivery_id}"

    @property
    def deliveries(self) -> str:
        """Sorted set: webhook calls by when the next attempt is due."""
        return f"{self.prefix}deliveries"

    @property
    def dead_deliveries(self) -> str:
        """Sorted set: webhook calls that were given up, by when."""
        return f"{self.prefix}dead_deliveries"

    @property
    def watched(self) -> str:
        """Hash: URLs to call at the ends of single requests, by model, shard and id."""
        return f"{self.prefix}watched"

    @property
    def schedules(self) -> str:
        """Hash: schedules by name, JSON."""
        return f"{self.prefix}schedules"


class GatewayKeys:
    """Names of what all gateways of a Redis server share; they lie in one slot of a cluster."""

    prefix = "ps:{gateway}:"

    @property
    def index(self) -> str:
        """Hash: digests of the secrets of every API key, newest first, by the key's id."""
        return f"{self.prefix}keys"

    def key(self, digest: str) -> str:
        """Hash: what the API key with a secret of this SHA-256 (in hex) allows."""
        return f"{self.prefix}key:{digest}"
