"""Settings of speculative decoding."""

from __future__ import annotations

from typing import Literal

from .section import Section, setting

__all__ = ["SpeculationSettings"]


class SpeculationSettings(Section):
    """Drafts of coming tokens that are verified several at a time (docs/speculation.md).

    The output is the same whatever is set here; only its speed differs.
    """

    source: Literal["auto", "off", "ngram", "draft"] = setting(
        "auto",
        "Where drafts may come from: `ngram` takes what followed the same tokens earlier in the "
        "text or in other outputs, `draft` the draft model, `auto` both. A request can ask for "
        "less.",
    )
    remember: bool = setting(
        True,
        "Whether `ngram` may take drafts from what other outputs of this worker have said, and not "
        "from the sequence's own text alone. It takes 8 MiB. No output depends on it, but how fast "
        "one comes may tell whether another said the same; with `engine.salt_by_tenant` only one "
        "of the same tenant.",
    )
    draft_model: str | None = setting(
        "auto",
        "Directory of a smaller checkpoint with the model's tokenizer, which proposes drafts. "
        "`auto` takes the one that comes with `demo` for that model and none for others; `off` "
        "takes none.",
        none="off",
        min_length=1,
    )
    verification: Literal["coupled", "rejection"] = setting(
        "coupled",
        "How drafts are accepted; both give the model's distribution exactly. `coupled`: where "
        "they are what would have been sampled, so that the tokens are those without drafts, "
        "whatever worker and load. `rejection`: by rejection sampling. It accepts sampled drafts "
        "of a draft model more often, but a seed gives the same tokens only with the same drafts.",
    )
    length: int | None = setting(
        None,
        "Drafts of each sequence in each step. `auto` chooses the number, also none, by measured "
        "cost and acceptance.",
        unit="tokens",
        none="auto",
        ge=1,
        le=16,
    )
    max_length: int = setting(
        7, "Most drafts of a sequence that `auto` chooses.", unit="tokens", ge=1, le=16
    )
