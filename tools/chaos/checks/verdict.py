"""Judges one ended request: readers, record and undisturbed output must agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.shared.protocol.events import End, rolling_digest
from penstock.shared.protocol.states import Reason, State

from ..storm.readers import Reading
from ..storm.storm_requests import Case
from .storm_counts import Ended, Findings, Invariant

__all__ = ["EndsBy", "judge"]

EndsBy = Callable[[int], int | None]

_SHOWN = 8


def judge(
    case: Case,
    readings: Sequence[Reading],
    late: Reading,
    record: dict[str, str],
    findings: Findings,
    *,
    cancelled: bool,
    ends_by: EndsBy,
) -> None:
    """Compare all accounts of an ended request; violations go to the findings.

    Args:
        case: the request and its expected output.
        readings: of the readers while it ran.
        late: of one reader after the end.
        record: its record in Redis, without the payload.
        findings: takes counts and violations.
        cancelled: a cancel returned that it ended the request.
        ends_by: see :class:`CaseRunner`.
    """
    for reading in (*readings, late):
        _judge_reader(case, reading, late, findings)
    end = late.end
    if end is None:
        return
    _judge_output(case, late, end, findings)
    _judge_end(case, end, record, findings, cancelled=cancelled, ends_by=ends_by)
    _judge_usage(case, end, record, findings)
    _count(end, record, findings)
    findings.ended[case.id] = Ended(
        end, rolling_digest(late.token_ids), record.get("lane", ""), record.get("tenant", "")
    )


def _judge_reader(case: Case, reading: Reading, late: Reading, findings: Findings) -> None:
    def wrong(invariant: Invariant, seen: str) -> None:
        findings.violated(invariant, case.id, f"{reading.kind} reader: {seen}")

    findings.counts[f"{reading.kind}_readers"] += 1
    for fault in reading.faults:
        wrong(Invariant.READERS_EXACT, fault)
    if reading.error is not None:
        wrong(Invariant.READERS_EXACT, f"{type(reading.error).__name__}: {reading.error}")
        return
    n = late.index
    if reading.past_end:
        if n >= reading.start:
            wrong(Invariant.READERS_EXACT, f"was told that {reading.start} is past the end, {n}")
        return
    if reading.end is None:
        wrong(Invariant.ONE_END, f"saw no end after token {reading.index}")
    elif reading.end.n != reading.index:
        wrong(Invariant.READERS_EXACT, f"has {reading.index} tokens; its end says {reading.end.n}")
    if reading is late:
        return
    if reading.end != late.end:
        wrong(Invariant.READERS_AGREE, f"saw end {reading.end}, the late reader {late.end}")
    if reading.token_ids != late.token_ids[reading.start :]:
        at = _first_difference(reading.token_ids, late.token_ids[reading.start :])
        wrong(
            Invariant.READERS_AGREE,
            f"differs from the late reader at {reading.start + at}: "
            f"{reading.token_ids[at : at + _SHOWN]} and "
            f"{late.token_ids[reading.start + at : reading.start + at + _SHOWN]}",
        )
    text, late_text = "".join(reading.text), "".join(late.text)
    if not late_text.endswith(text) or (reading.start == 0 and text != late_text):
        wrong(Invariant.READERS_AGREE, "its text is not the late reader's")


def _judge_output(case: Case, late: Reading, end: End, findings: Findings) -> None:
    """The log against what an undisturbed worker gives."""
    expected = case.expected
    whole = end.state is State.COMPLETED
    tokens = tuple(late.token_ids)
    right = expected.token_ids if whole else expected.token_ids[: len(tokens)]
    if tokens != right:
        at = _first_difference(tokens, right)
        findings.violated(
            Invariant.READERS_AGREE,
            case.id,
            f"output of {len(tokens)} tokens differs from the undisturbed one of {len(right)} at "
            f"{at}: {tokens[at : at + _SHOWN]} and {right[at : at + _SHOWN]}",
        )
    text = "".join(late.text)
    if (text != expected.text) if whole else not expected.text.startswith(text):
        findings.violated(
            Invariant.READERS_AGREE, case.id, f"text {text!r}, undisturbed {expected.text!r}"
        )
    if whole and end.reason is not expected.reason:
        findings.violated(
            Invariant.ONE_END, case.id, f"completed by {end.reason}, undisturbed {expected.reason}"
        )


def _judge_end(
    case: Case,
    end: End,
    record: dict[str, str],
    findings: Findings,
    *,
    cancelled: bool,
    ends_by: EndsBy,
) -> None:
    def wrong(seen: str) -> None:
        findings.violated(Invariant.ONE_END, case.id, seen)

    if not record:
        wrong("its record is gone")
        return
    said = (record.get("state"), record.get("reason"), record.get("tokens"))
    if said != (end.state.value, end.reason.value, str(end.n)):
        wrong(f"the record says {said}, the log {end}")
    due = "queue_deadline" if end.reason is Reason.QUEUE_TIMEOUT else "deadline"
    after = int(record["ended_at"]) - int(record[due])
    latest = ends_by(int(record[due]))
    findings.latest_end_ms = max(findings.latest_end_ms, after)
    if latest is not None and int(record["ended_at"]) > latest:
        allowed = latest - int(record[due])
        wrong(f"ended {after} ms after its deadline; {allowed} ms are allowed by the next sweep")
    if cancelled and end.reason is not Reason.CLIENT:
        wrong(f"a cancel was told that it ended the request; it is {end.state} ({end.reason})")
    if end.state is State.CANCELLED and case.cancel_after_s is None:
        wrong("is cancelled, and nobody did that")
    if end.state is State.EXPIRED and not case.may_expire and after < 0:
        wrong(f"expired {-after} ms before its deadline")
    if end.state in (State.FAILED, State.DEAD):
        wrong(f"is {end.state} ({end.reason}: {end.message}), and nothing is wrong with it")


def _judge_usage(case: Case, end: End, record: dict[str, str], findings: Findings) -> None:
    usage = end.usage
    if usage is None:
        if "claimed_at" in record:
            findings.violated(Invariant.USAGE_ONCE, case.id, f"{end.state} without usage")
        return
    if usage.output_tokens != end.n or str(usage.attempts) != record.get("attempts"):
        findings.violated(
            Invariant.USAGE_ONCE,
            case.id,
            f"{usage}; {end.n} tokens were published, claimed {record.get('attempts')} times",
        )
    prompt = case.expected.prompt_tokens
    # Its worker tells the prompt with the first tokens.
    if usage.prompt_tokens != (prompt if end.n or end.state is State.COMPLETED else 0):
        findings.violated(
            Invariant.USAGE_ONCE, case.id, f"{usage.prompt_tokens} prompt tokens, not {prompt}"
        )


def _count(end: End, record: dict[str, str], findings: Findings) -> None:
    counts = findings.counts
    counts["requests"] += 1
    counts["tokens"] += end.n
    counts[end.state.value] += 1
    attempts, before = int(record.get("attempts", 0)), int(record.get("claimed_tokens", 0))
    counts["claims"] += attempts
    if attempts > 1:
        counts["redelivered"] += 1
        counts["migrated"] += before > 0


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
