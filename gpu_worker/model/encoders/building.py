"""Builds the encoder that a worker serves from its settings."""

from __future__ import annotations

import logging
import time
from operator import itemgetter

import torch

from penstock.shared.protocol.states import ModelKind
from penstock.shared.settings import Settings

from ...batchers.batcher_class import ServedBatcher
from ..compute_threads import set_compute_threads
from ..loading.fingerprint import fingerprint_of
from .embedder import Embedder
from .encoder import Encoder, Row
from .scorer import Classifier, Reranker

__all__ = ["build_encoder"]

_log = logging.getLogger("penstock.model")

_TRIAL_ROWS, _TRIAL_TOKENS, _TRIALS = 8, 24, 3

_BATCH_TOKENS = 16_384
"""About so many tokens are computed before the next answers are sent."""

_CLASSES: dict[ModelKind, type[Embedder | Reranker | Classifier]] = {
    ModelKind.EMBED: Embedder,
    ModelKind.RERANK: Reranker,
    ModelKind.CLASSIFY: Classifier,
}


def build_encoder(settings: Settings, kind: ModelKind) -> ServedBatcher:
    """Load the checkpoint that the settings name. Takes seconds.

    Raises:
        ModelError: it is missing or cannot be served.
        ConfigurationError: a setting contradicts it.
    """
    set_compute_threads(settings.engine.threads)
    wanted = settings.model
    server = _CLASSES[kind](
        wanted.path, dtype=wanted.dtype, device=wanted.device, max_tokens=wanted.max_model_len
    )
    server.load()
    encoder = server.encoder
    if settings.engine.threads is None and encoder.device.type == "cpu":
        _choose_threads(encoder)
    dtype = str(encoder.model.dtype).removeprefix("torch.")
    return ServedBatcher(
        infer=server.infer,
        kind=kind,
        cost=server.cost,
        charged=itemgetter("tokens"),
        max_cost=_BATCH_TOKENS,
        context=encoder.max_tokens,
        on_pass=encoder.after_each_pass,
        summary=f"{encoder.folder.name} ({kind}) in {dtype} on {encoder.device}, "
        f"inputs of {encoder.max_tokens} tokens",
        fingerprint=fingerprint_of(encoder.folder, str(encoder.model.dtype)),
    )


def _choose_threads(encoder: Encoder) -> None:
    """Choose one thread or all, by timing a small batch.

    Threads that wait for each other on a shared machine cost more than they gain, so all must be
    clearly faster.
    """
    rows = [Row([5 % encoder.vocab_size] * _TRIAL_TOKENS)] * _TRIAL_ROWS
    most = torch.get_num_threads()
    seconds = {}
    for threads in {1, most}:
        torch.set_num_threads(threads)
        times = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            for _ in encoder.run(rows):
                pass
            times.append(time.perf_counter() - began)
        seconds[threads] = min(times)
    chosen = most if seconds[most] < 0.9 * seconds[1] else 1
    torch.set_num_threads(chosen)
    _log.info("using %d of %d threads: %d texts take %.1f ms with one, %.1f ms with all", chosen,
              most, _TRIAL_ROWS, 1000 * seconds[1], 1000 * seconds[most])  # fmt: skip
