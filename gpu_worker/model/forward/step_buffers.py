"""Memory that the steps of one shape share: what differs between two is written into it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import torch

__all__ = ["Numbers", "StepBuffers"]

_DTYPES = {"i": torch.int32, "q": torch.int64}


class Numbers:
    """Integers on the host, and a tensor that is the same memory.

    Args:
        kind: ``q`` for int64, ``i`` for int32.
        values: what they are at first, at least one.

    Attributes:
        values: the integers; their number stays.
        tensor: one-dimensional.
    """

    __slots__ = ("_kind", "tensor", "values")

    def __init__(self, kind: str, values: Sequence[int]) -> None:
        self._kind = kind
        self.values = array(kind, values)
        self.tensor = torch.frombuffer(self.values, dtype=_DTYPES[kind])

    def write(self, values: Sequence[int]) -> None:
        """Change all of them.

        Raises:
            ValueError: there are more or fewer.
        """
        if len(values) != len(self.values):  # their place would change
            raise ValueError(f"{len(values)} numbers in the place of {len(self.values)}")
        self.values[:] = array(self._kind, values)


class StepBuffers:
    """What a packed step reads, its block tables excepted.

    Args:
        query_lens: of each sequence, how many tokens it computes.
        num_groups: KV cache groups.
        device: of what no step changes; all else is on the host.

    Attributes:
        query_lens: the same.
        longest: the largest of them.
        host_query_starts: the first row of each sequence; the last entry is the number of rows.
        query_starts: the same, int32 on the device.
        rows: int64 on the device, all rows: each one's logits are wanted.
        tokens: one for each row.
        input_ids: the same, ``[1, T]``, on the host.
        positions: of each row in its sequence.
        contexts: how many tokens each sequence sees.
        slots: for each KV cache group, where each row's key and value go.
    """

    __slots__ = (
        "__weakref__", "contexts", "host_query_starts", "input_ids", "longest", "positions",
        "query_lens", "query_starts", "rows", "slots", "tokens",
    )  # fmt: skip

    def __init__(self, query_lens: tuple[int, ...], num_groups: int, device: torch.device) -> None:
        self.query_lens = query_lens
        self.longest = max(query_lens)
        self.host_query_starts = (0, *accumulate(query_lens))
        unknown = [0] * self.host_query_starts[-1]
        self.query_starts = Numbers("i", self.host_query_starts).tensor.to(device)
        self.rows = torch.arange(len(unknown), device=device)
        self.tokens, self.positions = Numbers("q", unknown), Numbers("q", unknown)
        self.input_ids = self.tokens.tensor.unsqueeze(0)
        self.contexts = Numbers("i", query_lens)
        self.slots = [Numbers("q", unknown) for _ in range(num_groups)]

    def write(self, token_ids: Sequence[int], positions: list[int]) -> list[int]:
        """Take the tokens of a step, and where each sequence's first one stands.

        Returns:
            How many tokens each sequence sees then.

        Raises:
            ValueError: there are more or fewer tokens than rows.
        """
        self.tokens.write(token_ids)
        contexts = list(map(int.__add__, positions, self.query_lens))
        if self.longest == 1:
            self.positions.write(positions)
        else:
            self.positions.write(list(chain.from_iterable(map(range, positions, contexts))))
        self.contexts.write(contexts)
        return contexts
