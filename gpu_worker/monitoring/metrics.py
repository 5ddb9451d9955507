"""The worker's metrics: every name, its labels and its buckets in one place.

Names are a public contract, pinned by a test; docs/metrics.md says what each means and what to do
when it moves. Base units (seconds, tokens, bytes). Latencies count from *acceptance* of the
request, so that they contain the queue: what the user feels.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.replies import SweepReply

from ..engine.speculation.controller import SpeculationStats
from ..engine.stats import BatcherStats, EngineStats
from ..messages import StepRecord
from .histogram import TallyHistogram

__all__ = ["WorkerMetrics"]

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600,
)  # fmt: skip
"""From a step on a fast GPU to a request that waited ten minutes."""

ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
"""Gaps between tokens; a reader notices from about 0.1 s on."""

STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.5, 5)
"""One step of the engine, from a small model on a GPU to a long prompt chunk on a CPU."""

COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Powers of two: tokens or sequences in a step."""


class WorkerMetrics:
    """All metrics of one worker, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"penstock_{name}", meaning, labels, registry=registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"penstock_{name}", meaning, labels, registry=registry)

        def histogram(
            name: str, meaning: str, buckets: tuple[float, ...], *labels: str
        ) -> Histogram:
            return Histogram(
                f"penstock_{name}", meaning, labels, buckets=buckets, registry=registry
            )

        self.requests = counter("requests", "Requests this worker ended", "state", "reason")
        self.claims = counter("claims", "Requests claimed")
        self.redeliveries = counter("redeliveries", "Claims of requests that had an owner before")
        self.append_refusals = counter(
            "append_refusals", "Writes that Redis refused, by why", "why"
        )
        self.orphan_tokens = counter(
            "orphan_tokens", "Tokens generated for requests that had ended or moved meanwhile"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self.cached_prompt_tokens = counter(
            "cached_prompt_tokens", "Of those, taken from the prefix cache"
        )
        self.generation_tokens = counter("generation_tokens", "Tokens published")
        self.preemptions = counter(
            "preemptions", "Running sequences put back to wait", "lane", "cause", "mode"
        )
        self.preempted_tokens = counter(
            "preempted_tokens",
            "Computed tokens of preempted sequences: kept on the host, or to be computed again",
            "lane",
            "cause",
            "mode",
        )
        self.swapped_blocks = counter(
            "swapped_blocks", "KV blocks copied between device and host", "direction"
        )
        self.swapped_bytes = counter("swapped_bytes", "The same in bytes", "direction")
        self.swap_refusals = counter(
            "swap_refusals", "Sequences computed again because the host's blocks were taken"
        )
        self.cache_evictions = counter(
            "prefix_cache_evictions", "Cached KV blocks given away because free ones ran out"
        )
        self.step_failures = counter(
            "step_failures", "Requests that failed inside a model step, alone after isolation"
        )
        self.deferrals = counter(
            "constraint_deferrals",
            "Tokens put off by a step, whose constraint was not ready in time",
        )
        self.ingress_entries = counter(
            "ingress_entries", "Entries taken in at the ingress, by verdict", "verdict"
        )
        self.isolated_errors = counter(
            "isolated_errors", "Unexpected errors that cost one item of a task and no more", "task"
        )
        self.redis_errors = counter("redis_errors", "Round trips to Redis that failed")
        self.swept = counter("swept_requests", "Requests this worker's sweeps moved", "kind")
        self.compacted_logs = counter("compacted_logs", "Logs of ended requests made compact")

        self.ttft = histogram(
            "time_to_first_token_seconds", "Acceptance to first token", LATENCY_BUCKETS, "lane"
        )
        self.queue_time = histogram(
            "queue_time_seconds", "Acceptance to first claim", LATENCY_BUCKETS, "lane"
        )
        self.duration = histogram(
            "request_duration_seconds", "Acceptance to end", LATENCY_BUCKETS, "lane"
        )
        self.itl = TallyHistogram(
            "penstock_inter_token_latency_seconds", "Gap between tokens", ITL_BUCKETS, registry
        )
        self.step_seconds = histogram("step_seconds", "Duration of a model step", STEP_BUCKETS)
        self.step_tokens = histogram("step_tokens", "Tokens computed in a step", COUNT_BUCKETS)
        self.step_sequences = histogram("step_sequences", "Sequences in a step", COUNT_BUCKETS)
        self.exchange_seconds = histogram(
            "exchange_seconds", "Round trip to Redis with tokens, claims and sweeps", STEP_BUCKETS
        )

        self.running = gauge("sequences_running", "Sequences with KV blocks", "lane")
        self.waiting = gauge("sequences_waiting", "Claimed sequences without KV blocks", "lane")
        self.drafted_tokens = counter(
            "drafted_tokens",
            "Drafts verified, by source and place among them",
            "source",
            "position",
        )
        self.accepted_tokens = counter(
            "accepted_tokens", "Of those, the ones that became output", "source", "position"
        )
        self.draft_failures = counter(
            "draft_failures", "Steps without drafts because the draft model failed"
        )
        self.speculation_gain = gauge(
            "speculation_gain_ratio", "Tokens per second over those without drafts, recent steps"
        )

        self.kv_blocks_total = gauge("kv_blocks_total", "KV blocks in the pool")
        self.kv_blocks_used = gauge("kv_blocks_used", "KV blocks that sequences hold")
        self.kv_blocks_cached = gauge("kv_blocks_cached", "Free KV blocks with a reusable prefix")
        self.pool_blocks_total = gauge("kv_pool_blocks_total", "KV blocks in the pool", "window")
        self.pool_blocks_used = gauge(
            "kv_pool_blocks_used", "KV blocks of the pool that sequences hold", "window"
        )
        self.pool_blocks_cached = gauge(
            "kv_pool_blocks_cached", "Free KV blocks of the pool with a reusable prefix", "window"
        )
        self.host_blocks_total = gauge("host_blocks_total", "Host blocks for swapped sequences")
        self.host_blocks_used = gauge("host_blocks_used", "Host blocks that hold one")
        self.queue_requests = gauge("queue_requests", "Requests waiting in the shard", "lane")
        self.queue_tokens = gauge("queue_tokens", "Estimated tokens waiting in the shard", "lane")
        self.batcher_items = gauge(
            "batcher_items", "Items of a batcher: waiting for a batch, or in one that runs", "state"
        )
        self.batcher_batches = gauge("batcher_batches_running", "Batches that run at once")
        self.batcher_window = gauge(
            "batcher_window_seconds", "How long an item that comes now would wait for others"
        )
        self.ready = gauge("ready", "1 after warm-up, 0 while loading or draining")
        self._seen: EngineStats | None = None

    def observe_step(self, record: StepRecord) -> None:
        """Count a step of the model."""
        self.step_seconds.observe(record.seconds)
        self.step_tokens.observe(record.num_tokens)
        self.step_sequences.observe(record.num_sequences)
        self.step_failures.inc(record.num_failures)
        self.deferrals.inc(record.num_deferred)
        self.draft_failures.inc(record.draft_failed)

    def count_sweep(self, swept: SweepReply) -> None:
        """Count what a sweep of this worker did."""
        self.swept.labels("expired").inc(swept.expired)
        self.swept.labels("reaped").inc(swept.reaped)
        self.swept.labels("disconnected").inc(swept.abandoned)
        self.swept.labels("model_changed").inc(swept.orphans)

    def show_depth(self, depth: Mapping[Lane, tuple[int, int]]) -> None:
        """Set the gauges of waiting work: requests and their estimated tokens, by lane."""
        for lane, (requests, tokens) in depth.items():
            self.queue_requests.labels(lane.value).set(requests)
            self.queue_tokens.labels(lane.value).set(tokens)

    def show_engine(self, stats: EngineStats) -> None:
        """Set the gauges to the engine's figures, and raise the counters by what they gained."""
        for lane, count in stats.running.items():
            self.running.labels(lane.value).set(count)
        for lane, count in stats.waiting.items():
            self.waiting.labels(lane.value).set(count)
        self.kv_blocks_total.set(stats.num_blocks)
        self.kv_blocks_used.set(stats.used_blocks)
        self.kv_blocks_cached.set(stats.cached_blocks)
        for pool in stats.pools:
            window = "full" if pool.window is None else str(pool.window)
            self.pool_blocks_total.labels(window).set(pool.num_blocks)
            self.pool_blocks_used.labels(window).set(pool.used_blocks)
            self.pool_blocks_cached.labels(window).set(pool.cached_blocks)
        self.host_blocks_total.set(stats.num_host_blocks)
        self.host_blocks_used.set(stats.used_host_blocks)
        seen, self._seen = self._seen, stats
        self._show_swaps(stats, seen)
        self.cache_evictions.inc(stats.evictions - (seen.evictions if seen else 0))
        for counter, totals, before in (
            (self.preemptions, stats.preemptions, seen.preemptions if seen else {}),
            (self.preempted_tokens, stats.preempted_tokens, seen.preempted_tokens if seen else {}),
        ):
            for (lane, cause, mode), total in totals.items():
                gained = total - before.get((lane, cause, mode), 0)
                counter.labels(lane.value, cause.value, mode.value).inc(gained)
        if stats.speculation is not None:
            self._show_speculation(stats.speculation, seen.speculation if seen else None)

    def show_batcher(self, stats: BatcherStats) -> None:
        """Set the gauges of a model that answers at once."""
        self.batcher_items.labels("waiting").set(stats.waiting)
        self.batcher_items.labels("running").set(stats.running)
        self.batcher_batches.set(stats.batches)
        self.batcher_window.set(stats.window_s)

    def _show_swaps(self, stats: EngineStats, seen: EngineStats | None) -> None:
        names = ("swapped_out_blocks", "swapped_in_blocks", "swapped_out_bytes",
                 "swapped_in_bytes", "swap_refusals")  # fmt: skip
        gained = [getattr(stats, name) - (getattr(seen, name) if seen else 0) for name in names]
        if any(gained):
            blocks_out, blocks_in, bytes_out, bytes_in, refusals = gained
            self.swapped_blocks.labels("out").inc(blocks_out)
            self.swapped_blocks.labels("in").inc(blocks_in)
            self.swapped_bytes.labels("out").inc(bytes_out)
            self.swapped_bytes.labels("in").inc(bytes_in)
            self.swap_refusals.inc(refusals)

    def _show_speculation(self, stats: SpeculationStats, seen: SpeculationStats | None) -> None:
        if stats is seen:
            return
        for counter, totals, before in (
            (self.drafted_tokens, stats.drafted, seen.drafted if seen else {}),
            (self.accepted_tokens, stats.accepted, seen.accepted if seen else {}),
        ):
            for (source, position), total in totals.items():
                gained = total - before.get((source, position), 0)
                counter.labels(source.value, str(position)).inc(gained)
        self.speculation_gain.set(stats.gain)
