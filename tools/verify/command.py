"""The command ``penstock verify``."""

from __future__ import annotations

from ..measurement import measurement
from ..report import Progress, Report
from .options import VerifyOptions

__all__ = ["verify"]


@measurement(
    title="penstock verify: {subject}",
    passed="verified: this model gives here what it gives in transformers",
    failed="NOT verified: {names} above the limit; do not serve it",
)
def verify(options: VerifyOptions, progress: Progress) -> Report:
    """Prove that a checkpoint gives here what it gives in transformers.

    Loads it here and in transformers, which takes twice the memory. Compares greedy tokens in
    random batch mixes, logits, and the perplexity of a text. Exit code 0: all checks hold; 1: one
    does not; 2: the input is wrong, or this model is not supported.
    """
    from .verification import verify_model

    return verify_model(options, progress)
