"""Sets speculation up for a loaded model: the draft model, and what the engine may draft."""

from __future__ import annotations

from penstock.shared.errors import ConfigurationError, ModelError
from penstock.shared.settings import Settings

from ...engine.speculation.controller import SpeculationConfig
from ..loading.checkpoint_folder import DEMO, DEMO_DRAFT
from ..loading.loaded_model import LoadedModel
from ..loading.model_opening import open_model

__all__ = ["load_draft", "speculation_config"]


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
        opened = open_model(
            path,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            native="auto" if settings.model.native == "on" else settings.model.native,
            runtime=None if target.native is None else target.native.runtime,
            recipe=target.recipe,
            records=settings.model.start_record == "on",
            keep_packed=settings.model.packed_weights == "disk",
        )
    except ModelError as error:
        raise ModelError(f"speculation.draft_model: {error}") from error
    draft = opened.loaded
    opened.remember()
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


def speculation_config(settings: Settings, *, has_draft_model: bool) -> SpeculationConfig | None:
    """What the engine may draft; None for nothing."""
    wanted = settings.speculation
    ngram = wanted.source in ("auto", "ngram")
    if not ngram and not has_draft_model:
        return None
    return SpeculationConfig(
        ngram=ngram,
        memory=ngram and wanted.remember,
        draft=has_draft_model,
        length=wanted.length,
        longest=wanted.max_length,
    )
