"""What the doctor finds: one line each, what it means, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ..report import Check, Number, Report

__all__ = ["Diagnosis", "Finding", "Level"]


class Level(IntEnum):
    """How bad a finding is."""

    OK = 0
    NOTE = 1
    """Nothing to do, but good to know; or it could not be looked at."""
    WARNING = 2
    """It works now, and will hurt in a case that is foreseeable."""
    ERROR = 3
    """A promise of penstock does not hold here, or it cannot work at all."""

    @property
    def label(self) -> str:
        """The word for it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        level: how bad it is.
        found: what is there.
        meaning: what that means; empty if all is well.
        remedy: what to do; empty if there is nothing to do.
    """

    name: str
    level: Level
    found: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        subject: address of the server and name of the shard.
        findings: in the order in which they are to be read.
        figures: flat, name -> number.
    """

    subject: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, Number]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.level < Level.ERROR for finding in self.findings)

    def report(self) -> Report:
        """The form that all measuring commands share; a check's value is its level, limit 2."""
        checks = tuple(
            Check(finding.name, int(finding.level), int(Level.WARNING)) for finding in self.findings
        )
        notes = tuple(
            f"{finding.name}: {finding.found}; {finding.meaning}"
            for finding in self.findings
            if finding.level > Level.OK
        )
        return Report(self.subject, self.figures, checks, notes)

    def as_json(self) -> dict[str, object]:
        """For ``json.dumps``: the shared form, and the findings in words."""
        rows = [
            {
                "name": finding.name,
                "level": finding.level.label,
                "found": finding.found,
                "meaning": finding.meaning,
                "remedy": finding.remedy,
            }
            for finding in self.findings
        ]
        return {**self.report().as_json(), "findings": rows}
