"""What a measurement or a verification found: figures, checks with their limits, and notes.

Every command that measures prints the same form: a table for people (see :mod:`.report_view`), one
JSON object for scripts. Its exit code is 0 only if all checks hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Check", "Number", "Progress", "Report"]

Number = int | float

Progress = Callable[[str, int, int], None]
"""Is told the stage, how much of it is done, and how much there is (0: unknown)."""


@dataclass(frozen=True, slots=True)
class Check:
    """A figure with a limit.

    Attributes:
        name: of the figure.
        value: what was found; NaN never passes.
        limit: the largest value that passes, or the smallest.
        at_least: whether it is the smallest.
    """

    name: str
    value: Number
    limit: Number
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the check holds."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run.

    Attributes:
        subject: what was looked at.
        figures: flat, name -> number.
        checks: all of them must hold.
        notes: what the figures do not tell, one sentence each.
        spread: least and greatest value, for figures that are medians of several rounds.
    """

    subject: str
    figures: Mapping[str, Number]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    spread: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that do not hold."""
        return tuple(check.name for check in self.checks if not check.ok)

    def as_json(self) -> dict[str, object]:
        """For ``json.dumps``; a figure that is not finite becomes null, as JSON has no NaN."""
        facts: dict[str, object] = {
            "figures": {name: _finite(value) for name, value in self.figures.items()},
            "checks": [
                {
                    "name": check.name,
                    "value": _finite(check.value),
                    "limit": check.limit,
                    "ok": check.ok,
                }
                for check in self.checks
            ],
            "notes": list(self.notes),
        }
        if self.spread:
            facts["spread"] = {
                name: [_finite(low), _finite(high)] for name, (low, high) in self.spread.items()
            }
        return facts


def _finite(value: Number) -> Number | None:
    return value if math.isfinite(value) else None
