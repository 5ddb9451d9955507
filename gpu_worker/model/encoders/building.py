"""Builds the encoder that a worker serves from its settings."""

from __future__ import annotations

from operator import itemgetter

import torch

from penstock.shared.protocol import ModelKind
from penstock.shared.settings import Settings

from ...batchers.batcher_class import ServedBatcher
from ..loading.fingerprint import fingerprint_of
from .embedder import Embedder
from .scorer import Classifier, Reranker

__all__ = ["build_encoder"]

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
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    wanted = settings.model
    server = _CLASSES[kind](
        wanted.path, dtype=wanted.dtype, device=wanted.device, max_tokens=wanted.max_model_len
    )
    server.load()
    encoder = server.encoder
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
