"""Step times by hand, calibration, and the arithmetic of histograms."""

from __future__ import annotations

import random

import pytest

from penstock.gpu_worker.engine.scheduling.step_features import StepFeatures
from penstock.gpu_worker.monitoring.metrics import WorkerMetrics
from penstock.shared.errors import ConfigurationError
from penstock.tools.simulate import HARDWARE, MODELS, Hardware, ModelShape, Roofline
from penstock.tools.simulate.measures import Histogram
from penstock.tools.simulate.step_time import calibrated

PLAIN = Hardware(
    bandwidth=1000.0, flops=10_000.0, bandwidth_share=1.0, flops_share=0.5, memory=10_000.0,
    overhead_s=0.25, sequence_s=0.125, link=200.0,
)  # fmt: skip
TINY = ModelShape(
    parameters=1000.0, layers=2, query_heads=2, kv_heads=1, head_dim=5, weight_bytes=2,
    kv_bytes=1, context=100,
)  # fmt: skip


def test_a_decode_is_bound_by_memory() -> None:
    """2,000 bytes of weights and 20 for each of 50 tokens, at 1,000 a second."""
    work = StepFeatures(tokens=1, context=50, pairs=50, sequences=1)
    assert Roofline(PLAIN, TINY).seconds(work) == pytest.approx(3.0 + 0.25 + 0.125)


def test_a_prefill_is_bound_by_operations() -> None:
    """2,000 operations for each of 100 tokens, 80 for each of 5,050 pairs, at 5,000 a second."""
    work = StepFeatures(tokens=100, context=100, pairs=5050, sequences=1)
    seconds = (2000 * 100 + 80 * 5050) / 5000
    assert Roofline(PLAIN, TINY).seconds(work) == pytest.approx(seconds + 0.25 + 0.125)


def test_a_swap_takes_the_link() -> None:
    """20 bytes for each of 30 tokens, at 200 a second."""
    assert Roofline(PLAIN, TINY).swap_seconds(30) == pytest.approx(3.0)


def test_kv_pool_is_what_weights_leave() -> None:
    """9,000 of 10,000 bytes, less 2,000, in blocks of 4 tokens of 20 bytes."""
    assert Roofline(PLAIN, TINY).kv_blocks(4) == 7000 // 80


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="choose a larger device"):
        Roofline(HARDWARE["cpu"], MODELS["7b"]).kv_blocks(16)


def test_calibration_gives_the_measured_mean() -> None:
    from prometheus_client import generate_latest

    metrics = WorkerMetrics()
    for seconds in (0.02, 0.04):
        metrics.step_seconds.observe(seconds)
        metrics.step_tokens.observe(8)
        metrics.step_sequences.observe(4)
    scrape = generate_latest(metrics.registry).decode()
    model = Roofline(HARDWARE["cpu"], MODELS["demo"])
    fitted = calibrated(model, scrape, context=100)
    assert fitted.seconds(StepFeatures(8, 400, 800, 4)) == pytest.approx(0.03)
    with pytest.raises(ConfigurationError, match="counts no step"):
        calibrated(model, "", context=100)


def test_quantiles_are_right_to_a_bin() -> None:
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(-3, 2) for _ in range(5001))
    histogram, half = Histogram(), Histogram()
    for value in values[:2500]:
        histogram.add(value)
    for value in values[2500:]:
        half.add(value)
    histogram.merge(half)
    for share in (0.01, 0.5, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[int(share * 5000)], rel=0.011)
    assert histogram.quantile(1.0) == pytest.approx(values[-1], rel=0.011)
    assert histogram.mean == pytest.approx(sum(values) / 5001)
