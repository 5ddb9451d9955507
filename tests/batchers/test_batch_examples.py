"""The examples of batchers, as they are, against a real worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from workers import WorkerFactory

from penstock.gpu_worker.batchers.batcher_class import load_batcher
from penstock.gpu_worker.batchers.halving import Result, run_in_halves
from penstock.gpu_worker.engine.requests.engine_request import Finish
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.payload import unpack_result
from penstock.shared.protocol.states import Reason

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "batchers"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis() as server:
        factory = WorkerFactory(server.url, tmp_path_factory.mktemp("workers"))
        target = ("--batcher", "nearest_centroid:Flowers", "--name", "flowers")
        factory.supervised("flowers", *target, PYTHONPATH=str(EXAMPLES))
        yield server.url
        factory.close()


def test_the_classifier_answers(url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ask.py"), "flowers", "[5.1, 3.5, 1.4, 0.2]"],
        env={**os.environ, "REDIS_URL": url},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, rate = done.stdout.splitlines()
    assert first == "setosa"
    assert rate.endswith("answers a second")


def test_the_image_classifier_takes_images_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(EXAMPLES)
    served = load_batcher("image_classifier:ImageClassifier")
    images = [{"width": 8, "height": 12, "rgb": bytes([n]) * 288} for n in range(3)]
    assert {served.key(image) for image in images} == {(8, 12)}
    assert served.cost(images[0]) == 96
    with pytest.raises(ValueError, match="three bytes"):
        served.key({"width": 8, "height": 12, "rgb": b""})
    together = run_in_halves(served.infer, images)
    for image, result in zip(images, together, strict=True):
        (alone,) = run_in_halves(served.infer, [image])
        assert isinstance(result, Result)
        assert isinstance(alone, Result)
        assert unpack_result(result.packed) == pytest.approx(unpack_result(alone.packed))
        assert sum(unpack_result(result.packed).values()) == pytest.approx(1)


def test_a_bad_flower_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    served = load_batcher("nearest_centroid:Flowers")
    good, bad = run_in_halves(served.infer, [[6.4, 3.2, 4.5, 1.5], "rose"])
    assert isinstance(good, Result)
    assert unpack_result(good.packed) == "versicolor"
    assert isinstance(bad, Finish)
    assert bad.reason is Reason.INVALID
