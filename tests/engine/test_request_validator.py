"""Options that name tokens the model does not have end their request before any step."""

from __future__ import annotations

from typing import Any

import pytest
from engine.fakes import PieceStream, config, kv_manager, request

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.request_validator import RequestValidator
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason


def validator(cfg: EngineConfig) -> RequestValidator:
    return RequestValidator(cfg, kv_manager(cfg))


def refusal(eos: frozenset[int] = frozenset({3}), **options: Any) -> str | None:
    finish = validator(config(vocab_size=10, eos_token_ids=eos)).refuse_options(
        SamplingOptions(**options)
    )
    assert finish is None or finish.reason is Reason.INVALID
    return None if finish is None else finish.message


def test_ids_below_the_vocabulary_are_taken() -> None:
    assert refusal(stop_token_ids=(9,), banned_token_ids=(9,), logit_bias={9: 1.0}) is None
    assert refusal(allowed_token_ids=(0, 9), min_tokens=3) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (1, 10)),
        ("allowed_token_ids", (1, 10)),
        ("banned_token_ids", (1, 10)),
        ("logit_bias", {1: 0.5, 10: 1.0}),
    ],
)
def test_unknown_ids_are_refused_by_the_name_of_their_field(field: str, value: Any) -> None:
    message = refusal(**{field: value})
    assert message is not None
    place = "10" if field == "logit_bias" else "1"
    assert message.startswith(f"{field}[{place}]: got 10; allowed: a token id from 0 to 9")


def test_a_model_without_a_vocabulary_takes_any_id() -> None:
    options = SamplingOptions(stop_token_ids=(2**31 - 1,))
    assert validator(config(vocab_size=None)).refuse_options(options) is None


def test_options_that_leave_nothing_to_choose_are_refused() -> None:
    message = refusal(allowed_token_ids=(3, 4), stop_token_ids=(4,), min_tokens=1)
    assert message is not None
    assert message.startswith("allowed_token_ids: got (3, 4)")
    assert refusal(allowed_token_ids=(3, 4), min_tokens=1) is None
    assert refusal(allowed_token_ids=(3,), ignore_eos=True, min_tokens=1) is None
    message = refusal(banned_token_ids=tuple(i for i in range(10) if i != 3), min_tokens=1)
    assert message is not None
    assert message.startswith("banned_token_ids")
    assert refusal(banned_token_ids=tuple(range(9))) is None


def test_the_engine_refuses_at_once() -> None:
    engine = Engine(config(vocab_size=10), PieceStream)
    update = engine.add(request("a", banned_token_ids=(1, 77)))
    assert update is not None
    assert update.finish is not None
    assert update.finish.reason is Reason.INVALID
    assert update.finish.message.startswith("banned_token_ids[1]: got 77")
    assert not engine.has_work
    assert engine.add(request("b", banned_token_ids=(1, 7))) is None
