"""A drafter is an optimisation: where it fails, its step goes on without drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from ...engine.plan import BlockCopy, Span
from .drafters import Drafter, Proposal

__all__ = ["DraftFallback"]

_log = logging.getLogger("penstock.model")


class DraftFallback:
    """Asks a drafter, and proposes nothing where that raises or gives more than was asked for.

    The first failure is logged with its trace, as one is likely followed by many; all are counted.

    Args:
        drafter: as :class:`.Drafter` says, it goes on from what it knew before it raised.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._failed = False
        self._told = False

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """See :class:`.Drafter`."""
        try:
            self._drafter.copy_blocks(copies)
        except Exception as error:  # whatever it was, no request depends on it
            self._note(error)

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        """See :class:`.Drafter`."""
        try:
            proposals = self._drafter.propose(spans)
            _check(spans, proposals)
        except Exception as error:  # no request depends on a proposal either
            self._note(error)
            return [Proposal(())] * len(spans)
        return proposals

    def take_failed(self) -> bool:
        """Whether it has failed since this was asked last."""
        failed, self._failed = self._failed, False
        return failed

    def _note(self, error: Exception) -> None:
        self._failed = True
        if not self._told:
            self._told = True
            _log.error(
                "the draft model failed (%s: %s): its steps go on without drafts; logged once, "
                "counted in penstock_draft_failures_total",
                type(error).__name__,
                error,
                exc_info=error,
            )


def _check(spans: Seq[Span], proposals: Seq[Proposal]) -> None:
    """Check lengths: a longer proposal would be written into blocks of other sequences."""
    if len(proposals) != len(spans):
        raise ValueError(f"{len(proposals)} proposals for {len(spans)} sequences")
    for span, proposal in zip(spans, proposals, strict=True):
        if len(proposal.token_ids) > span.num_drafts:
            raise ValueError(f"{len(proposal.token_ids)} drafts where {span.num_drafts} were asked")
