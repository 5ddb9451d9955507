"""Sets speculation up for a loaded model: the draft model, its KV, and what steps cost here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from penstock.shared.errors import ConfigurationError, ModelError
from penstock.shared.settings import Settings

from ...engine.speculation.controller import SpeculationConfig
from ...engine.speculation.verification_cost import Calibration
from ..loading.checkpoint import DEMO, DEMO_DRAFT
from ..loading.loader import LoadedModel, load_model
from ..runner import ModelRunner
from .drafters import DraftModel

__all__ = ["AUTO_LONGEST", "configure", "load_draft"]

_log = logging.getLogger("penstock.model")

AUTO_LONGEST = 7

_DRAFTS = (0, 1, 3, AUTO_LONGEST)
_GROWTH = 4
_PASSES, _REPEATS = 3, 2

_SECONDS = 2.5
"""What timing steps at start may take; larger ones than came by then are extrapolated."""


def load_draft(settings: Settings, target: LoadedModel) -> LoadedModel | None:
    """The draft model that goes with ``target``; None if there is to be none.

    Raises:
        ModelError: it cannot be loaded.
        ConfigurationError: it alone is to propose drafts and is not there, or its tokens are not
            the target's.
    """
    path = settings.speculation.draft_model
    if path == "auto":
        path = DEMO_DRAFT if settings.model.path == DEMO else None
    if path is None and settings.speculation.source == "draft":
        raise ConfigurationError(
            "speculation.source is draft, and there is no draft model: give its directory as "
            "speculation.draft_model, or take source auto, ngram or off"
        )
    if path is None or settings.speculation.source not in ("auto", "draft"):
        return None
    try:
        draft = load_model(
            path,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
        )
    except ModelError as error:
        raise ModelError(f"speculation.draft_model: {error}") from error
    if draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ConfigurationError(
            f"speculation.draft_model: the tokens of {draft.path} are not those of {target.path}; "
            "a draft model must have its target's tokenizer: choose another one, or 'off'"
        )
    window = target.geometry.windows
    if window and None not in {layer.window for layer in target.geometry.layers}:
        reach = [layer.window for layer in draft.geometry.layers]
        if None in reach or max(w for w in reach if w is not None) > max(window):
            raise ConfigurationError(
                f"speculation.draft_model: {draft.path} sees further back than {target.path}, "
                f"whose KV blocks are given up behind its window of {max(window)} tokens; choose "
                "a draft model with that window, or 'off'"
            )
    return draft


def configure(
    settings: Settings, runner: ModelRunner, drafter: DraftModel | None, max_sequences: int
) -> SpeculationConfig | None:
    """What the engine may draft, with the times of steps on this device; None for nothing."""
    wanted = settings.speculation
    ngram = wanted.source in ("auto", "ngram")
    if not ngram and drafter is None:
        return None
    config = SpeculationConfig(
        ngram=ngram,
        draft=drafter is not None,
        length=wanted.length,
        longest=wanted.max_length,
    )
    if wanted.length is not None:
        return config
    calibration = _calibrate(runner, drafter, max_sequences)
    _log.info(
        "a step of one sequence takes %.1f ms, with %d drafts %.1f ms; timed up to %d sequences",
        1000 * calibration.verify[0][0],
        calibration.drafts[-1],
        1000 * calibration.verify[0][-1],
        calibration.sequences[-1],
    )
    return replace(config, calibration=calibration)


def _calibrate(runner: ModelRunner, drafter: DraftModel | None, max_sequences: int) -> Calibration:
    began = time.perf_counter()
    verify: dict[int, list[float]] = {}
    draft: dict[int, float] = {}
    last = 0.0
    for number in range(_PASSES):
        # All sizes in turn, and again: a machine that is slow for a while is so for all of them.
        for count in tuple(verify) if number else _powers(max_sequences):
            since = time.perf_counter()
            if not number and verify and since - began + _GROWTH * last > _SECONDS / _PASSES:
                break
            before = verify.get(count, [math.inf] * len(_DRAFTS))
            times = (runner.time_decode(count, num_drafts=k, repeats=_REPEATS) for k in _DRAFTS)
            verify[count] = list(map(min, before, times))
            if drafter is not None:
                seconds = drafter.time_round(count, repeats=_REPEATS)
                draft[count] = min(draft.get(count, math.inf), seconds)
            last = time.perf_counter() - since
    return Calibration(
        sequences=tuple(verify),
        drafts=_DRAFTS,
        verify=tuple(map(tuple, verify.values())),
        draft=tuple(draft.values()) if drafter is not None else None,
    )


def _powers(most: int) -> Iterator[int]:
    count = 1
    while count < most:
        yield count
        count *= _GROWTH
    yield most
