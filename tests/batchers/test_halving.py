"""One bad payload does not take its batch with it."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from typing import Any

import pytest
from doubler import AsyncDoubler, Doubler
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.batchers.batcher_class import load_batcher, serve_class
from penstock.gpu_worker.batchers.halving import Result, run_in_halves
from penstock.gpu_worker.engine.requests.engine_request import Finish
from penstock.shared.errors import ConfigurationError, InvalidRequest
from penstock.shared.protocol.payload import unpack_result
from penstock.shared.protocol.states import ModelKind, Reason

BAD = {
    "value": ({"raise": "value"}, Reason.INVALID, "ValueError: bad x"),
    "other": ({"raise": "other"}, Reason.ENGINE_ERROR, "RuntimeError: bad x"),
    "cancelled": ({"raise": "cancelled"}, Reason.ENGINE_ERROR, "CancelledError: bad x"),
    "few": ({"few": True}, Reason.ENGINE_ERROR, "0 results for 1 items"),
    "returned": ({"return": "error"}, Reason.ENGINE_ERROR, "KeyError: 'x'"),
    "unsendable": ({"return": "object"}, Reason.ENGINE_ERROR, "it holds a object"),
}


def infer(items: list[Any]) -> object:
    return Doubler.infer(doubler(), items)


def doubler() -> Doubler:
    made = Doubler()
    made.load()
    return made


@given(kinds=st.lists(st.sampled_from(["good", *BAD]), min_size=1, max_size=12))
def test_the_bad_fail_and_the_good_are_served(kinds: list[str]) -> None:
    payloads = [
        {"x": index, **(BAD[kind][0] if kind in BAD else {})} for index, kind in enumerate(kinds)
    ]
    results = run_in_halves(infer, payloads)
    assert len(results) == len(kinds)
    for index, (kind, result) in enumerate(zip(kinds, results, strict=True)):
        if kind == "good":
            assert isinstance(result, Result)
            assert unpack_result(result.packed)["y"] == 2 * index
        else:
            _, reason, message = BAD[kind]
            assert isinstance(result, Finish)
            assert result.reason is reason
            assert message in result.message


def test_one_culprit_costs_a_logarithm_of_calls() -> None:
    made, size = doubler(), 64
    run_in_halves(made.infer, [{"x": i, **({"few": True} if i == 37 else {})} for i in range(size)])
    assert made.calls == 1 + 2 * math.log2(size)


@pytest.mark.parametrize("returned", [None, 7, "ab", b"ab", {"a": 1, "b": 2}, [1], [1, 2, 3]])
def test_what_is_no_list_of_results_fails(returned: object) -> None:
    for result in run_in_halves(lambda items: returned, ["a", "b"]):
        assert isinstance(result, Finish) or returned == [1]


def test_an_invalid_request_says_field_value_remedy() -> None:
    def refuse(items: list[Any]) -> list[Any]:
        return [InvalidRequest("dimensions", 5, "at most 4") for _ in items]

    (finish,) = run_in_halves(refuse, ["a"])
    assert finish == Finish(Reason.INVALID, "dimensions: got 5; allowed: at most 4")


def test_arrays_become_lists() -> None:
    numpy = pytest.importorskip("numpy")
    rows = run_in_halves(lambda items: numpy.ones((2, 3)), ["a", "b"])
    assert [unpack_result(row.packed) for row in rows if isinstance(row, Result)] == [[1.0] * 3] * 2


def test_an_asynchronous_batcher_runs_in_one_loop() -> None:
    served = serve_class(AsyncDoubler(), ModelKind.BATCH, summary="", fingerprint="0" * 16)
    for _ in range(2):
        assert served.infer([{"x": 4}]) == [{"y": 8, "batch": 1}]
    served.close()


def test_a_class_is_loaded_by_its_name() -> None:
    served = load_batcher("doubler:Doubler")
    assert served.infer([{"x": 4}]) == [{"y": 8, "batch": 1}]
    assert (served.cost({}), served.key({"key": 3}), len(served.fingerprint)) == (1, 3, 16)
    with closing(load_batcher("doubler:AsyncDoubler")) as other:
        assert other.fingerprint != served.fingerprint


def test_a_batcher_that_does_not_load_leaves_no_loop_open() -> None:
    made: list[asyncio.AbstractEventLoop] = []

    class Broken(AsyncDoubler):
        async def load(self) -> None:
            made.append(asyncio.get_running_loop())
            raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        serve_class(Broken(), ModelKind.BATCH, summary="", fingerprint="0" * 16)
    assert [loop.is_closed() for loop in made] == [True]


@pytest.mark.parametrize(
    "target",
    ["doubler", ":Doubler", "doubler:", "doubler:Missing", "no_such:Doubler", "doubler:Nothing"],
)
def test_what_is_no_batcher_is_refused(target: str) -> None:
    with pytest.raises(ConfigurationError):
        load_batcher(target)
