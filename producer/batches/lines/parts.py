"""Files of finished lines: written whole, then named by the batch's record.

A part that no record names is never read. So a driver that dies between the two loses nothing and
repeats nothing.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from ...results import Result
from ..stores.records import Batch, BatchUsage, batch_folder
from ..stores.storage import Storage

__all__ = ["FinishedLines", "json_line", "write_parts"]


@dataclass(slots=True)
class FinishedLines:
    """Lines that ended since the record was last written.

    Attributes:
        places: their places in the plan.
        answers: lines of the output file.
        errors: lines of the error file.
        usage: their tokens.
    """

    places: set[int] = field(default_factory=set)
    answers: list[bytes] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)
    usage: BatchUsage = field(default_factory=BatchUsage)

    def add(self, place: int, line: dict[str, Any], result: Result | None) -> None:
        """Add a line's end: with an ``error``, or a status other than 200, it is one.

        ``result`` is what its request came to, if it has run.
        """
        self.places.add(place)
        response = line["response"]
        ok = response is not None and response["status_code"] == 200
        (self.answers if ok else self.errors).append(json_line(line))
        if result is not None and (usage := result.usage) is not None:
            more = BatchUsage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
                reasoning_tokens=sum(choice.reasoning_tokens for choice in result.choices),
            )
            self.usage = self.usage.plus(more)


def write_parts(storage: Storage, batch: Batch, finished: FinishedLines) -> Batch:
    """Write part files of finished lines; returns the batch that names them. It blocks."""
    names = {"parts": batch.parts, "error_parts": batch.error_parts}
    for kind, lines in (("parts", finished.answers), ("error_parts", finished.errors)):
        if lines:
            part = f"{len(names[kind]):06d}-{secrets.token_hex(4)}"
            name = f"{batch_folder(batch.id)}/{kind}/{part}"
            storage.write(name, lines)
            names[kind] = (*names[kind], name)
    return batch.model_copy(
        update={
            **names,
            "in_flight": tuple(p for p in batch.in_flight if p not in finished.places),
            "completed": batch.completed + len(finished.answers),
            "failed": batch.failed + len(finished.errors),
            "usage": batch.usage.plus(finished.usage),
        }
    )


def json_line(value: dict[str, Any]) -> bytes:
    """A value as a line of a JSONL file."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
