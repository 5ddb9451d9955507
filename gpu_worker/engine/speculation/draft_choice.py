"""Which source drafts for each sequence of a step, and how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import DraftSource
from .acceptance_rate import expected_tokens, worthwhile

__all__ = ["FREE", "DraftOption", "Prices", "choose_drafts"]


@dataclass(slots=True)
class DraftOption:
    """Drafts that one span could have.

    Attributes:
        index: of the span in the step.
        source: where the drafts come from.
        rate: chance that a draft is accepted once all drafts before it were.
        count: number of drafts.
        drafts: the tokens, at least ``count``; empty where the draft model is to propose them.
    """

    index: int
    source: DraftSource
    rate: float
    count: int
    drafts: tuple[int, ...] = ()

    def value(self, price: float) -> float:
        """Expected output tokens, less what verification costs at ``price`` a draft."""
        return expected_tokens(self.rate, self.count) - price * self.count


@dataclass(frozen=True, slots=True)
class Prices:
    """What drafts cost, in output tokens that the same time would have given.

    Attributes:
        step: of having drafts in a step at all, however few.
        token: of verifying one draft.
        round: of one forward pass of the draft model for all sequences that ask it.
    """

    step: float
    token: float
    round: float


FREE = Prices(0.0, 0.0, 0.0)


def choose_drafts(
    found: Sequence[Sequence[DraftOption]], prices: Prices, *, probing: bool
) -> list[DraftOption]:
    """For each sequence the source and length with the greatest expected gain.

    A draft is worth its place if the chance of its acceptance is at least its price. Prices come
    from the present throughput, so this maximises tokens over time (Dinkelbach, 1967). All
    sequences share the draft model's rounds. So it proposes only if the sequences that prefer it
    gain more together than its rounds cost.

    Args:
        found: the options of each sequence, own text first; ``count`` is the most.
        prices: of drafts in this step.
        probing: give each sequence at least one draft, whatever it promises.

    Returns:
        One option of each sequence that gets drafts; none if the step as a whole does not pay.
    """
    price = prices.token
    chosen: list[DraftOption] = []
    preferred: list[tuple[DraftOption | None, DraftOption]] = []
    for both in found:
        for option in both:
            wanted = worthwhile(option.rate, price, option.count)
            option.count = max(wanted, 1) if probing else wanted
        text = both[0] if both[0].source.is_text else None
        model = None if both[-1].source.is_text else both[-1]
        if model is None or (text is not None and text.value(price) >= model.value(price)):
            chosen.append(both[0])
        else:
            preferred.append((text, model))
    rounds_price = _limit_rounds([model for _, model in preferred], prices)
    improvement = sum(
        [m.value(price) - (0.0 if t is None else t.value(price)) for t, m in preferred]
    )
    texts = [text for text, _ in preferred if text is not None]
    if improvement > rounds_price or (probing and not chosen and not texts):
        chosen += [model for _, model in preferred]
    else:
        chosen += texts
        rounds_price = 0.0
    chosen = [option for option in chosen if option.count]
    value = sum([option.value(price) for option in chosen]) - rounds_price - prices.step
    if value <= 0 and not probing:
        return []
    return sorted(chosen, key=lambda option: option.index)


def _limit_rounds(asking: Sequence[DraftOption], prices: Prices) -> float:
    """Shorten drafts to the rounds of the draft model that pay; returns the price of those.

    The first round stays: whether it pays depends on what the sequences could have instead.
    """
    most = max([option.count for option in asking], default=0)
    for rounds in range(1, most):
        gains = [o.rate ** (rounds + 1) - prices.token for o in asking if o.count > rounds]
        if sum(gains) < prices.round:
            most = rounds
            break
    for option in asking:
        option.count = min(option.count, most)
    return prices.round * most
