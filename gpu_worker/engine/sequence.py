"""A sequence: tokens of a request, and where their keys and values are kept."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from penstock.shared.protocol.states import Lane

if TYPE_CHECKING:
    from penstock.shared.protocol.sampling_options import SamplingOptions

__all__ = ["Constraint", "Sequence", "SequenceStatus"]


_MOST_PROMPT_ROWS = 256
"""Query tokens in one step of a sequence whose prompt's logits are asked for, as a row of logits is
large: 256 of a vocabulary of 150,000 take 77 MB in half precision."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in the engine. A finished sequence never changes again."""

    WAITING = "waiting"
    """In the policy's queue; holds no block on the device, but perhaps some on the host."""
    RUNNING = "running"
    """Has blocks; takes part in every step."""
    FINISHED = "finished"
    """Ended or aborted; holds no block, and the engine has forgotten it."""


class Constraint(Protocol):
    """Follows one output through its schema, regex, grammar or choices, on the model side."""

    @property
    def may_draft(self) -> bool:
        """Whether the masks of drafts would be ready in time for a step."""

    def num_allowed(self, token_ids: Seq[int], num_prompt_tokens: int, drafts: Seq[int]) -> int:
        """How many of ``drafts``, from the first on, may follow an output in a row.

        Args:
            token_ids: prompt and output.
            num_prompt_tokens: how many of them are the prompt.
            drafts: tokens that may come next.
        """


class Sequence:
    """One output of a request inside the engine; most requests have one.

    There is no prefill and no decode phase. A sequence has ``num_tokens`` tokens, and its blocks
    hold the keys and values of the first ``num_computed_tokens``. Every step lets it catch up by
    some. Once all are computed the logits of the last one give the next token.

    Owned by the engine: others read it, and only during the step whose plan names it.

    Attributes:
        id: the request's id.
        lane: its urgency.
        tenant: the tenant that is charged.
        options: sampling and stop options.
        seed: keys the random numbers of this request, together with the output index.
        arrival: when the request came, in seconds of any monotonic clock.
        deadline: when it expires, by the same clock; None: never.
        cache_salt: only sequences with equal salt share cached prefixes.
        status: see :class:`SequenceStatus`.
        token_ids: prompt and output, in order.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many have their keys and values in its blocks.
        num_cached_tokens: prompt tokens that were taken from the prefix cache when it was first
            admitted, instead of being computed.
        block_tables: one per KV cache group: block numbers; position ``p`` lives in block
            ``table[p // block_size]`` at offset ``p % block_size``. ``NO_BLOCK`` where that has
            left the window. Empty while the sequence holds no block.
        num_writable_tokens: positions ``[num_computed_tokens, num_writable_tokens)`` lie in blocks
            that are this sequence's alone, so it may write there; kept by the KV manager.
        block_digests: chained content digests of the first full blocks (see ``prefix_cache``).
        num_published_blocks: leading blocks that were already offered to the prefix cache.
        num_preemptions: how often it lost its blocks.
        constraint: follows the output on the model side; None if it has no constraint.
        host_blocks: per KV cache group the host blocks that keep its KV while it waits; empty
            while it runs, or if none is kept.
        num_swapped_tokens: leading tokens whose keys and values are kept there.
        num_prompt_logprobs: prompt tokens, from the second on, whose log-probabilities are known;
            None: the request does not ask for them, or has published them.
        rank: ``lane.rank``, looked up once; 0 is the most urgent.
        choice: which of its request's outputs this is; 0 for a request that has one.
        siblings: the sequences of its request that the scheduler has, itself among them; empty for
            a request that has one. They may share the blocks of what they have in common.
        num_candidates: how many of the most likely next tokens the model side reports, for beam
            search to choose among. 0: it samples the next token.
    """

    __slots__ = (
        "arrival",
        "block_digests",
        "block_tables",
        "cache_salt",
        "choice",
        "constraint",
        "deadline",
        "host_blocks",
        "id",
        "lane",
        "num_cached_tokens",
        "num_candidates",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_swapped_tokens",
        "num_writable_tokens",
        "options",
        "rank",
        "seed",
        "siblings",
        "status",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        *,
        id: str,
        prompt_ids: Iterable[int],
        options: SamplingOptions,
        lane: Lane = Lane.NORMAL,
        tenant: str = "default",
        seed: int = 0,
        arrival: float = 0.0,
        cache_salt: bytes = b"",
        deadline: float | None = None,
        choice: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.id = id
        self.lane = lane
        self.tenant = tenant
        self.options = options
        self.seed = seed
        self.arrival = arrival
        self.cache_salt = cache_salt
        self.deadline = deadline
        self.choice = choice
        self.siblings: Collection[Sequence] = ()
        self.num_candidates = 0
        self.constraint = constraint
        self.num_prompt_logprobs: int | None = None
        self.rank = lane.rank
        self.status = SequenceStatus.WAITING
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_writable_tokens = 0
        self.num_preemptions = 0
        self.block_tables: tuple[list[int], ...] = ()
        self.block_digests: list[bytes] = []
        self.num_published_blocks = 0
        self.host_blocks: tuple[tuple[int, ...], ...] = ()
        self.num_swapped_tokens = 0

    def clone(self, choice: int, token_ids: Iterable[int]) -> Sequence:
        """Another sequence of the same request, with the same prompt, that holds no block."""
        clone = Sequence(
            id=self.id,
            prompt_ids=token_ids,
            options=self.options,
            lane=self.lane,
            tenant=self.tenant,
            seed=self.seed,
            arrival=self.arrival,
            cache_salt=self.cache_salt,
            deadline=self.deadline,
            choice=choice,
        )
        clone.num_prompt_tokens = self.num_prompt_tokens
        clone.siblings = self.siblings
        clone.num_candidates = self.num_candidates
        return clone

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id}/{self.choice} {self.lane.value} {self.status.value}: "
            f"{self.num_computed_tokens} of {self.num_tokens} tokens computed, "
            f"{self.num_output_tokens} of them output, {sum(map(len, self.block_tables))} blocks>"
        )

    def chunk(self, most: int) -> int:
        """How many of the next ``most`` tokens one step may compute."""
        # Others need one row of logits, this one needs a row for every token of the prompt.
        return most if self.num_prompt_logprobs is None else min(most, _MOST_PROMPT_ROWS)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far; also the output index of the token sampled next."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The output as a new list: O(output), so not for every step."""
        return self.token_ids[self.num_prompt_tokens :]
