"""The histogram for many equal values exposes what prometheus_client's own would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock.gpu_worker.monitoring.histogram import TallyHistogram

BOUNDS = (0.001, 0.25, 1, 5)
VALUES = st.sampled_from([0.0, 0.001, 0.0010001, 0.25, 0.5, 1.0, 5.0, 7.5])


@given(st.lists(st.dictionaries(VALUES, st.integers(1, 9), max_size=4), max_size=4))
def test_exposes_what_the_ordinary_histogram_does(tallies: list[dict[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram("gap_seconds", "Gap", BOUNDS, ours)
    plain = Histogram("gap_seconds", "Gap", buckets=BOUNDS, registry=theirs)
    for values in tallies:
        tally.observe(values.items())
        for value, times in values.items():
            for _ in range(times):
                plain.observe(value)
    assert lines(ours) == lines(theirs)


def lines(registry: CollectorRegistry) -> list[tuple[str, float]]:
    text = generate_latest(registry).decode()
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return [(name, round(float(value), 9)) for name, _, value in rows if "_created" not in name]
