"""The load gate refuses models whose output here would differ from their own.

A configuration does not tell whether an unknown family works over a paged pool. Several families
fail silently: some keep chunked attention in the mask alone, others carry a state from token to
token (linear attention, convolutions). Others' embeddings count positions themselves. So the gate
tries the model: a few tokens, packed and in chunks over the pool, must give the logits of the
model's own forward.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from penstock.shared.errors import UnsupportedModel

from ..forward.attention_registry import implementation_of, registered
from ..forward.batch import Rows, SequenceChunk, forward_logits, pack
from ..forward.forward_context import ForwardContext
from ..kv.kv_pool import KVPool
from .geometry import KVGeometry, ProbeResult
from .trial import BLOCK_SIZE, ROUTED_SHARE, Trial, are_within

__all__ = [
    "check_attention",
    "check_config",
    "check_numbers",
    "check_probe",
    "context_limit",
    "trial_logits",
    "unsupported",
]

log = logging.getLogger(__name__)

SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})

REMEDY = (
    "penstock serves decoders in which every layer computes full or sliding-window attention "
    "through transformers' attention interface, such as Llama, Mistral, Qwen2, Qwen3, Gemma, "
    "Phi-3, OLMo 2, Granite, Mixtral, gpt-oss and DeepSeek-V3"
)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest relative L2 difference of one token's logits, by dtype of the model.

Two correct ways of computing attention differ by the dtype's rounding, some 1e-6, 1e-3 and 1e-2. A
wrong mask or a lost state gives 1e-1 and more.
"""

ATTEMPTS = 4
"""Sets of random tokens to try in half precision, until one agrees. A rerouted token changes the
tokens after it by chance; a model that is wrong here is wrong for every set."""

PROBE_TOKENS = 24
PROBE_LIMIT = 1100
PROBE_FLOPS = {"cpu": 2e11, "cuda": 2e14}


def unsupported(config: Any, why: str) -> UnsupportedModel:
    """The refusal of the model with ``config``, in one line."""
    names = getattr(config, "architectures", None) or [type(config).__name__]
    return UnsupportedModel(
        f"{names[0]} (model type {config.model_type}) is not supported: {why}; {REMEDY}"
    )


def check_config(config: Any) -> None:
    """Check the configuration alone, before any weight is read.

    Raises:
        UnsupportedModel: no causal language model, an encoder-decoder, or a layer type other than
            full and sliding attention.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(config, "it is an encoder-decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unsupported(config, "it is no causal language model")
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or []
    foreign = sorted({kind for kind in layer_types if kind not in SUPPORTED_LAYERS})
    if foreign:
        count = sum(kind in foreign for kind in layer_types)
        raise unsupported(
            config, f"{count} of its {len(layer_types)} layers are of type {', '.join(foreign)}"
        )


def context_limit(config: Any) -> int | None:
    """Longest context in which a token's result depends on its own sequence alone; None: any.

    LongRoPE (Ding et al., 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens")
    has two sets of frequencies. For a whole forward, transformers takes the long one if any
    position in it lies past the original context. Of a packed step that would be the tokens of all
    sequences, and of a long prompt in chunks only those of its last chunks.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    # Either one set of parameters, or one for each type of layer.
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [
        int(parameters["original_max_position_embeddings"])
        for parameters in sets
        if parameters.get("rope_type") == "longrope"
    ]
    longest = getattr(text, "max_position_embeddings", None)
    limit = min(limits, default=None)
    return None if limit is None or (longest is not None and longest <= limit) else limit


def check_attention(model: Any) -> None:
    """Check that the model accepts another attention function.

    Raises:
        UnsupportedModel: it only warns, and keeps its own.
    """

    def nothing(*_: Any, **__: Any) -> tuple[Tensor, None]:
        raise AssertionError("never called")

    before = implementation_of(model)
    with registered(nothing) as name:
        model.set_attn_implementation(name)
        taken = implementation_of(model) == name
        model.set_attn_implementation(before)
    if not taken:
        raise unsupported(model.config, "its attention cannot be replaced")


def check_probe(config: Any, probe: ProbeResult) -> None:
    """Check that every layer reached the attention function, with the window it declares.

    Raises:
        UnsupportedModel: a layer did not.
    """
    text = config.get_text_config(decoder=True)
    reached, expected = len(probe.modules), int(text.num_hidden_layers)
    if reached != expected:
        raise unsupported(
            config, f"{reached} of its {expected} layers reach the attention function"
        )
    if probe.problems:
        raise unsupported(config, "; ".join(probe.problems))
    for index, kind in enumerate(getattr(text, "layer_types", None) or []):
        window = probe.geometry.layers[index].window
        if (kind == "sliding_attention") != (window is not None):
            raise unsupported(
                config,
                f"layer {index} is declared {kind} but hands the attention function "
                f"{'no window' if window is None else f'a window of {window}'}",
            )


@torch.inference_mode()
def check_numbers(
    model: Any, attention: str, context: ForwardContext, geometry: KVGeometry, vocab_size: int
) -> Trial:
    """Compare the packed paged forward with the model's own, on random tokens.

    The model's own logits come from its eager attention with its own masks and positions. A last
    step asks for the logits of some tokens alone. The model is left with the paged attention in
    place.

    Args:
        model: as loaded.
        attention: registered name of the paged attention.
        context: what that attention reads its batch from.
        geometry: of the model.
        vocab_size: token ids are drawn below it.

    Returns:
        The trial that it passed.

    Raises:
        UnsupportedModel: the logits differ by more than rounding explains, or a step gives those
            of other tokens than it asks for.
    """
    exact = model.dtype == torch.float32
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    allowed_share = 0.0 if exact else ROUTED_SHARE
    length = _probe_length(model, geometry)
    forward = functools.partial(forward_logits, model, context)
    for seed in range(1 if exact else ATTEMPTS):
        generator = torch.Generator().manual_seed(seed)
        one, two = (
            torch.randint(0, vocab_size, (size,), generator=generator).tolist()
            for size in (length, length - 5)
        )
        trial = Trial(one, two, _own_logits(model, attention, one, two), model.device, model.dtype)
        differences = trial.differences(forward, geometry)
        worst = max(float(difference.max()) for difference in differences)
        if are_within(differences, tolerance, allowed_share):
            log.info(
                "load gate: logits of %d tokens agree with transformers' own forward "
                "(relative difference at most %.2g)",
                len(one) + len(two),
                worst,
            )
            selection = trial.selection_difference(forward, geometry)
            if not selection <= tolerance:
                raise unsupported(
                    model.config,
                    "asked for the logits of some tokens alone, it gives others "
                    f"(relative difference {selection:.2g}, allowed {tolerance:g})",
                )
            return trial
    raise unsupported(
        model.config,
        f"its logits over the paged pool differ from its own forward by up to {worst:.2g} "
        f"(relative; allowed {tolerance:g} in {str(model.dtype).removeprefix('torch.')})",
    )


@torch.inference_mode()
def trial_logits(
    model: Any, context: ForwardContext, geometry: KVGeometry, vocab_size: int
) -> Tensor:
    """Logits of a fixed short input through the paged attention, ``[rows, vocab]``.

    Rows of a step with many tokens and of one with a single token, which take different code.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (PROBE_TOKENS,), generator=generator).tolist()
    last = len(ids) - 1
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    pool = KVPool(geometry, len(blocks), BLOCK_SIZE, model.device, model.dtype)
    steps = (
        SequenceChunk(ids[:last], 0, [blocks], Rows.ALL),
        SequenceChunk(ids[last:], last, [blocks], Rows.ALL),
    )
    return torch.cat([forward_logits(model, context, pack([chunk], pool), pool) for chunk in steps])


def _own_logits(model: Any, attention: str, *sequences: list[int]) -> list[Tensor]:
    """Logits of all tokens of each sequence by the model's eager attention."""
    model.set_attn_implementation("eager")
    try:
        return [
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
            .logits[0]
            .float()
            for ids in sequences
        ]
    finally:
        model.set_attn_implementation(attention)


def _probe_length(model: Any, geometry: KVGeometry) -> int:
    """Tokens of the longer probe sequence: past every sliding window where that is cheap."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    budget = PROBE_FLOPS.get(model.device.type, PROBE_FLOPS["cpu"])
    # Two sequences by two paths, two operations per parameter and token.
    affordable = min(int(budget / (8 * max(parameters, 1))), PROBE_LIMIT)
    text = model.config.get_text_config(decoder=True)
    for limit in (getattr(text, "max_position_embeddings", None), context_limit(model.config)):
        affordable = min(affordable, limit or affordable)
    length = PROBE_TOKENS
    for window in geometry.windows:
        if window + 2 * BLOCK_SIZE <= affordable:
            length = max(length, window + 2 * BLOCK_SIZE)
        else:
            log.info(
                "load gate: the sliding window of %d tokens is not crossed by the check of the "
                "logits, which would take too long for this model here",
                window,
            )
    return length
