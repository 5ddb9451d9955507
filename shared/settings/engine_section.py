"""Settings of the engine: budgets, orders, memory."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize

from ..policy_name import PolicyName
from .section import Section, setting

__all__ = ["EngineSettings"]


class EngineSettings(Section):
    """What one step of the engine may hold, and the memory for it."""

    max_batch_tokens: int | None = setting(
        None,
        "Token budget of one step: prompt chunks and decodes together. More gives throughput, less "
        "gives shorter gaps between tokens while prompts are read. `auto` takes 256 on a CPU and "
        "2048 on a GPU, and without chunks what the longest prompt needs.",
        unit="tokens",
        none="auto",
        ge=1,
        le=1_048_576,
    )
    max_sequences: int = setting(
        64, "Most sequences that run at the same time.", unit="sequences", ge=1, le=4096
    )
    chunking: Literal["fixed", "adaptive", "off"] = setting(
        "fixed",
        "How prompts are divided among steps. `fixed`: by `chunk_size`. `adaptive`: so that a step "
        "in which others decode takes `target_itl_ms`, predicted from earlier steps. `off`: not at "
        "all; every stream stands still while a prompt is read, and `max_batch_tokens` must hold "
        "the longest sequence.",
    )
    chunk_size: int | None = setting(
        None,
        "Most prompt tokens of one sequence in one step; with `adaptive` the most of all sequences "
        "together. `auto` sets no bound but the token budget.",
        unit="tokens",
        none="auto",
        ge=1,
        le=1_048_576,
    )
    min_chunk_size: int = setting(
        16,
        "Prompt tokens that a step may compute even if it then takes longer than `target_itl_ms`, "
        "so that prompts are read at all. For `adaptive` only; at most `chunk_size`.",
        unit="tokens",
        ge=1,
        le=1_048_576,
    )
    target_itl_ms: float = setting(
        50.0,
        "Time between two tokens of a stream that `adaptive` steers for while prompts are read. "
        "Lower makes streams smoother and first tokens later.",
        unit="ms",
        gt=0,
        le=60_000,
    )
    policy: PolicyName = setting(
        PolicyName.FCFS,
        "In which order claimed requests are admitted, lane by lane: "
        + "; ".join(f"`{name}` {name.effect}" for name in PolicyName)
        + ".",
    )
    max_overtake_s: float = setting(
        30.0,
        "Bound on overtaking by `policy`: no request is admitted before one that has waited for "
        "this long when it arrives. With `fair`, tenants that had no turn for this long get every "
        "second admission. With `edf` it holds for requests without a deadline; others are bounded "
        "by theirs. A preempted request that has waited this long is next, whatever its lane. "
        "0 serves by arrival.",
        unit="s",
        ge=0,
        le=86_400,
    )
    block_size: int = setting(
        16,
        "Tokens per block of the KV cache. Prompts share whole blocks only, so smaller shares more "
        "and costs more bookkeeping.",
        unit="tokens",
        ge=1,
        le=256,
    )
    kv_memory: ByteSize | None = setting(
        None,
        "Memory for the KV cache. On a GPU `auto` takes 90 % of what is free after the model is "
        "loaded. On a CPU it takes 25 % of what is free, but not over 1 GiB.",
        unit="bytes",
        none="auto",
        ge=1,
        le=2**50,
    )
    prefix_cache: bool = setting(
        True, "Whether the KV blocks of equal beginnings of prompts are computed once and shared."
    )
    salt_by_tenant: bool = setting(
        False,
        "Whether only requests of the same tenant share them. Then no tenant can tell by the time "
        "to its first token what another one has asked. A beginning that all tenants have in "
        "common is computed once for each. Drafts from other outputs (`speculation.remember`) "
        "come from the same tenant's, too.",
    )
    preemption: Literal["auto", "swap", "recompute"] = setting(
        "auto",
        "What becomes of the KV of a sequence that must give up its blocks. `swap` copies it to "
        "host memory and back. `recompute` drops it and computes it again. `auto` measures both "
        "and takes the faster. When `swap_memory` is full, it is computed again.",
    )
    swap_memory: ByteSize | None = setting(
        None,
        "Host memory for swapped KV; 0 for none. `auto` takes as much as the KV cache has, but not "
        "over 4 GiB or an eighth of what is free. Beside a GPU it is pinned: taken at start, and "
        "rounded down to the powers of two that such memory is allocated in. On a CPU it is taken "
        "as it is used.",
        unit="bytes",
        none="auto",
        ge=0,
        le=2**50,
    )
    constraint_wait_ms: float = setting(
        2.0,
        "How long a step waits for masks of structured outputs, once the device has its work. "
        "A sequence whose mask is late gets its token in a later step.",
        unit="ms",
        ge=0,
        le=1000,
    )
    constraint_timeout_s: float = setting(
        10.0,
        "A schema, regex or grammar that takes longer to compile, or to make one mask, is refused. "
        "Waiting for others does not count.",
        unit="s",
        gt=0,
        le=600,
    )
    overlap: bool = setting(
        True,
        "Record and publish a step's tokens while the next step computes, where its plan does not "
        "depend on them, and plan and pack the one after it. Tokens are the same without. It needs "
        "the native library with two threads or more.",
    )
    threads: int | None = setting(
        None,
        "CPU threads for the model's arithmetic. `auto` times a decode step at start. It takes one "
        "per core if that is clearly faster than a single one; for small models it is not. "
        "Cores are those that the process may use, and no more than its container's CPU quota.",
        unit="threads",
        none="auto",
        ge=1,
        le=1024,
    )
    cores: str | None = setting(
        None,
        "Cores of the system that the engine process runs on, such as `0-3,8`. Each thread of the "
        "native library, except the calling one, keeps to one of them. For machines with several "
        "workers, or several NUMA nodes: give each worker cores of its own. `off` leaves it to the "
        "system.",
        none="off",
        pattern=r"^\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*$",
        max_length=1000,
    )
