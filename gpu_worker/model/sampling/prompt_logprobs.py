"""Log-probabilities of a prompt's own tokens, chunk by chunk as the prompt is computed.

The logits at a position give the probabilities of the next token. So a chunk reports the tokens
from its second to the one after its last, and the prompt's first token is never reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.shared.protocol.events import TokenLogprobs

from ...engine.plan import Span
from ...engine.sequence import Sequence as EngineSequence
from .logprobs import LogprobRows, Logprobs
from .row_operations import RowOperations

__all__ = ["PromptRows"]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a step's logits that report prompt tokens, and those that are sampled from.

    Attributes:
        spans: the spans with prompt rows.
        counts: number of prompt rows of each span.
        figures: all these rows.
        tokens: int64 ``[R]``, on the device: the prompt token that each row reports.
        sampled: int64 ``[N]``, the rows of spans that sample.
    """

    spans: tuple[Span, ...]
    counts: tuple[int, ...]
    figures: LogprobRows
    tokens: Tensor
    sampled: Tensor

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        drafts: Mapping[EngineSequence, Sequence[int]],
        device: torch.device,
    ) -> PromptRows | None:
        """The rows of a step; None if no span has prompt rows.

        A span with prompt rows has a row of logits for each of its tokens. Any other span that
        samples has a row for its last token and for each draft.
        """
        asking = [s for s in spans if s.sequence.num_prompt_logprobs is not None and s.prompt_rows]
        if not asking:
            return None
        first, rows, widths, tokens, sampled = 0, [], [], [], []
        for span in spans:
            wanted, offset = span.prompt_rows, first - span.start
            if wanted:
                sequence = span.sequence
                rows += [offset + position for position in wanted]
                tokens += sequence.token_ids[wanted.start + 1 : wanted.stop + 1]
                widths += [sequence.options.prompt_logprobs or 0] * len(wanted)
            if wanted:
                first += span.num_tokens
                sampled += [first - 1] * span.samples
            elif span.samples:
                count = 1 + len(drafts.get(span.sequence, ()))
                sampled += range(first, first + count)
                first += count
        return cls(
            tuple(asking),
            tuple(len(span.prompt_rows) for span in asking),
            LogprobRows(tuple(rows), torch.tensor(rows, device=device), tuple(widths)),
            torch.tensor(tokens, device=device),
            torch.tensor(sampled, dtype=torch.int64, device=device),
        )

    def compute(self, logits: Tensor, operations: RowOperations) -> Logprobs:
        """Queue the work; ``logits [rows, V]`` are those of the whole step, and stay unchanged."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        tokens[self.figures.index] = self.tokens
        return self.figures.compute(logits, tokens, operations)

    def by_sequence(self, figures: Logprobs) -> dict[EngineSequence, tuple[TokenLogprobs, ...]]:
        """The result of :meth:`compute` by sequence. Waits for the device."""
        found = iter(figures.by_row().values())
        return {
            span.sequence: tuple(next(found) for _ in range(count))
            for span, count in zip(self.spans, self.counts, strict=True)
        }
