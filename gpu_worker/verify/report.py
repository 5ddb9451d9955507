"""What a verification found: figures, checks with their limits, and notes for a person."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Check", "Number", "Report"]

Number = int | float


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that must not be above its limit.

    Attributes:
        name: of the figure.
        value: what was found; NaN never passes.
        limit: the largest value that passes.
    """

    name: str
    value: Number
    limit: Number

    @property
    def ok(self) -> bool:
        """Whether the check holds."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one verification.

    Attributes:
        model: what was verified.
        figures: flat, name -> number.
        checks: all of them must hold.
        notes: what the figures do not tell, one sentence each.
    """

    model: str
    figures: dict[str, Number]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """For ``json.dumps``; a figure that is not finite becomes null, as JSON has no NaN."""
        return {
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


def _finite(value: Number) -> Number | None:
    return value if math.isfinite(value) else None
