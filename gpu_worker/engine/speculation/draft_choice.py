"""Which source drafts for each sequence of a step, and how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from ..plan import DraftSource

__all__ = ["FREE", "DraftOption", "Prices", "choose_drafts", "even_chances"]


@dataclass(slots=True)
class DraftOption:
    """Drafts that one span could have.

    Attributes:
        index: of the span in the step.
        source: where the drafts come from.
        chances: of each draft, that it and all before it are accepted; none grows.
        count: number of drafts, at most as many as there are chances.
        drafts: the tokens, at least ``count``; empty where the draft model is to propose them.
    """

    index: int
    source: DraftSource
    chances: Sequence[float]
    count: int
    drafts: tuple[int, ...] = ()

    def value(self, price: float) -> float:
        """Expected output tokens, less what verification costs at ``price`` a draft."""
        return sum(self.chances[: self.count]) - price * self.count

    def limit(self, price: float) -> None:
        """Leave those whose chance is at least their price."""
        count = 0
        for chance in self.chances[: self.count]:
            if chance < price:
                break
            count += 1
        self.count = count


def even_chances(rate: float, count: int) -> list[float]:
    """Of ``count`` drafts, each accepted with the chance ``rate`` once all before it were."""
    return list(accumulate(repeat(rate, count), mul))


class Prices(NamedTuple):
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
        found: the options of each sequence, those of texts first; ``count`` is the most.
        prices: of drafts in this step.
        probing: give each sequence at least one draft, whatever it promises.

    Returns:
        One option of each sequence that gets drafts; none if the step as a whole does not pay.
    """
    price = prices.token
    chosen: list[DraftOption] = []
    preferred: list[tuple[DraftOption | None, DraftOption]] = []
    for options in found:
        for option in options:
            option.limit(price)
            if probing and not option.count:
                option.count = 1
        model = None if options[-1].source.is_text else options[-1]
        texts = options if model is None else options[:-1]
        text = max(texts, key=lambda each: each.value(price)) if texts else None
        if model is None or (text is not None and text.value(price) >= model.value(price)):
            assert text is not None
            chosen.append(text)
        else:
            preferred.append((text, model))
    rounds_price = _limit_rounds([model for _, model in preferred], prices)
    improvement = sum(
        [m.value(price) - (0.0 if t is None else t.value(price)) for t, m in preferred]
    )
    instead = [text for text, _ in preferred if text is not None]
    if improvement > rounds_price or (probing and not chosen and not instead):
        chosen += [model for _, model in preferred]
    else:
        chosen += instead
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
        gains = [o.chances[rounds] - prices.token for o in asking if o.count > rounds]
        if sum(gains) < prices.round:
            most = rounds
            break
    for option in asking:
        option.count = min(option.count, most)
    return prices.round * most
