"""How long a batch waits for more."""

from __future__ import annotations

import random

import pytest

from penstock.gpu_worker.batchers.window import Window


def learned(each_batch: float, each_unit: float, gap: float, max_wait: float = 1.0) -> Window:
    """A window that has seen batches of these costs, and arrivals at this distance."""
    window, rng = Window(max_wait), random.Random(7)
    for _ in range(200):
        cost = rng.randint(1, 16)
        window.ran(cost, each_batch + each_unit * cost)
    for index in range(100):
        window.arrived(index * gap)
    return window


def test_a_fixed_window_lasts_from_the_first_item() -> None:
    assert Window(0.5, adaptive=False).ends_at(3, 3, first=10.0, newest=10.4) == 10.5


def test_without_knowledge_it_does_not_wait() -> None:
    window = Window(0.5)
    assert window.ends_at(1, 1, first=10.0, newest=10.0) == 10.0
    window.ran(1, 0.1)
    assert window.ends_at(1, 1, first=10.0, newest=10.0) == 10.0


def test_the_costs_are_found() -> None:
    assert learned(0.02, 0.001, 1.0).costs == pytest.approx((0.02, 0.001), rel=0.05)


def test_it_waits_while_the_next_item_comes_soon_enough() -> None:
    window = learned(0.02, 0.0001, gap=0.002)
    worth = (0.02 - 0.0001) / 2
    assert window.ends_at(1, 1, first=10.0, newest=10.0) == pytest.approx(10 + worth, rel=0.01)
    assert window.ends_at(9, 9, first=10.0, newest=10.0) == 10.0  # 2 ms each: as dear as a batch


@pytest.mark.parametrize(
    ("each_batch", "each_unit", "gap"),
    [(0.02, 0.0001, 0.5), (0.0001, 0.01, 0.002)],
    ids=["few requests", "batches spare nothing"],
)
def test_it_does_not_wait_where_that_does_not_pay(
    each_batch: float, each_unit: float, gap: float
) -> None:
    window = learned(each_batch, each_unit, gap)
    assert window.ends_at(1, 1, first=10.0, newest=10.0) == 10.0


def test_it_never_waits_beyond_its_bound() -> None:
    window = learned(10.0, 0.0, gap=0.001, max_wait=0.5)
    assert window.ends_at(1, 1, first=10.0, newest=10.4) == 10.5


def test_the_rule_is_the_difference_of_the_sums_of_latencies() -> None:
    """The module's formula, against both sums written out."""
    rng = random.Random(3)
    for _ in range(200):
        a, b, w = rng.uniform(0, 1), rng.uniform(0, 0.1), rng.uniform(0, 0.5)
        n = rng.randint(1, 12)
        busy = a + b * n
        if w > busy:  # then the newcomer finds an idle device: never worth waiting for
            continue
        now = n * busy + (busy - w) + a + b
        wait = n * (w + busy + b) + busy + b
        assert now - wait == pytest.approx(a - (n + 1) * w - b * n)
