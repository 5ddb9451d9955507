"""The threads that compute steps."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from .library import DrawInput, Library, LogitsInput, MaskInput, ReportInput
from .operands import Draws, address_of

__all__ = ["ThreadPool"]


class ThreadPool:
    """The threads that compute steps; several programs may share one, one step at a time.

    Args:
        library: whose pool it is.
        threads: with the calling one.
        spin_us: how long a thread looks for the next step before it sleeps, in microseconds.
        pinned: whether each but the calling one keeps to a core of its own, of those that the
            process may use.
    """

    def __init__(
        self, library: Library, threads: int, *, spin_us: int = 200, pinned: bool = False
    ) -> None:
        if threads < 1 or spin_us < 0:
            raise ValueError(f"a pool of {threads} threads that spin {spin_us} us cannot be")
        self.threads = threads
        self._library = library
        self.handle = library.pool_create(threads, spin_us, int(pinned))
        if not self.handle:
            raise MemoryError("no thread can be started")
        weakref.finalize(self, library.pool_destroy, self.handle)

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each row and the first place of it; NaN is the largest.

        Args:
            rows: float32 ``[N, M]``, whose columns are neighbours in memory.

        Returns:
            float32 ``[N]`` and int64 ``[N]``.
        """
        if rows.dtype != torch.float32 or rows.stride(-1) != 1:
            raise ValueError(f"rows of {rows.dtype}, strides {rows.stride()}")
        count, columns = rows.shape
        values, places = torch.empty(count), torch.empty(count, dtype=torch.int64)
        self._library.checked(
            "largest", self.handle, rows.data_ptr(), count, columns, max(columns, rows.stride(0)),
            values.data_ptr(), places.data_ptr(),
        )  # fmt: skip
        return values, places

    def draw(self, logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
        """Draw tokens by temperature, top-k, top-p and min-p, with Gumbel noise.

        A token depends on its row, its options and its random numbers alone.

        Args:
            logits: float32 ``[N, M]``, whose columns are neighbours in memory.
            largest: float32 ``[N]``, the largest of each row.
            draws: from which rows, and how.

        Returns:
            int64 ``[R]``; 0 for a row whose largest logit is not finite.
        """
        given = _logits_input(logits, largest)
        how = DrawInput(
            draws.rows.numel(), draws.rows.data_ptr(), draws.temperature.data_ptr(),
            draws.seeds.data_ptr(), draws.choices.data_ptr(), draws.indexes.data_ptr(),
            draws.stream, *map(address_of, (draws.top_k, draws.top_p, draws.log_min_p)),
        )  # fmt: skip
        tokens = torch.empty_like(draws.rows)
        self._library.checked(
            "draw", self.handle, ctypes.byref(given), ctypes.byref(how), tokens.data_ptr()
        )
        return tokens

    def logprobs(
        self, logits: Tensor, largest: Tensor, rows: Tensor, tokens: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of a token of each of ``R`` rows, and of the most likely ones.

        Args:
            logits: float32 ``[N, M]``, whose columns are neighbours in memory.
            largest: float32 ``[N]``, the largest of each row.
            rows: int64 ``[R]``.
            tokens: int64 ``[R]``.
            width: how many of the most likely tokens.

        Returns:
            float32 ``[R]``, float32 ``[R, width]`` and their ids int64 ``[R, width]``, most likely
            first, of equals the lowest id first. They mean nothing for a row whose largest logit is
            not finite.
        """
        given, count = _logits_input(logits, largest), rows.numel()
        wanted = ReportInput(count, rows.data_ptr(), tokens.data_ptr(), width)
        chosen, values = torch.empty(count), torch.empty(count, width)
        ids = torch.empty(count, width, dtype=torch.int64)
        self._library.checked(
            "logprobs", self.handle, ctypes.byref(given), ctypes.byref(wanted),
            chosen.data_ptr(), values.data_ptr(), ids.data_ptr(),
        )  # fmt: skip
        return chosen, values, ids

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Make the logits of forbidden tokens -inf, in place.

        Args:
            logits: float32 ``[N, M]``, whose columns are neighbours in memory.
            rows: int64 ``[R]``, no row twice.
            masks: int32 ``[R, words]``, contiguous. Bit ``i % 32`` of word ``i // 32`` tells
                whether token ``i`` may come.
        """
        count = rows.numel()
        if masks.dtype != torch.int32 or not masks.is_contiguous() or len(masks) != count:
            raise ValueError(f"masks of {masks.dtype} {tuple(masks.shape)} for {count} rows")
        given = _logits_input(logits, logits)
        wanted = MaskInput(
            given.values, given.rows, given.columns, given.stride, count, rows.data_ptr(),
            masks.data_ptr(), masks.shape[1],
        )  # fmt: skip
        self._library.checked("forbid", self.handle, ctypes.byref(wanted))


def _logits_input(logits: Tensor, largest: Tensor) -> LogitsInput:
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(f"logits of {logits.dtype}, strides {logits.stride()}")
    rows, columns = logits.shape
    stride = max(columns, logits.stride(0))
    return LogitsInput(logits.data_ptr(), rows, columns, stride, largest.data_ptr())
