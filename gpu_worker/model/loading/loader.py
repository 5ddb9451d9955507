"""Loads a checkpoint from a directory and makes it ready to run over a paged KV pool."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.cpu import NativeUnavailable
from penstock.kernels.kv_layout import KVLayout
from penstock.shared.errors import (
    ConfigurationError,
    InsufficientMemory,
    ModelError,
    PenstockError,
)

from ..forward.attention import PagedAttention
from ..forward.attention_registry import register, unregister
from ..forward.forward_context import ForwardContext
from ..kv.memory_budget import available_bytes
from ..program.native_decoder import NativeDecoder, NativeRuntime, NoRoomToPack
from ..quantization.recipe import AUTO, Recipe, quantize_model
from . import load_gate
from .checkpoint import (
    DEMO,
    find_checkpoint,
    load_config,
    load_tokenizer,
    load_weights,
    one_line,
    quiet,
    stored_quantization,
)
from .geometry import KVGeometry, probe_geometry
from .loaded_model import LoadedModel
from .prepack import prepack_linears
from .trial import Trial

__all__ = [
    "DEMO",
    "DTYPES",
    "LoadedModel",
    "adopt_model",
    "check_kv_cache_dtype",
    "load_model",
    "pick_device",
    "pick_dtype",
]

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

LONGROPE_LIMIT = (
    "this model's LongRoPE changes the frequencies of all tokens of a step as soon as one of them "
    "lies past that position, so a longer sequence would change the output of others"
)


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    native: str = "auto",
    runtime: NativeRuntime | None = None,
    recipe: Recipe = AUTO,
    prepack: bool = True,
    kv_cache_dtype: str = "auto",
) -> LoadedModel:
    """Load a checkpoint of transformers from a local directory.

    Nothing is ever downloaded, and no code out of the directory is run.

    Args:
        path: the directory, or ``"demo"`` for the model that is shipped here.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``auto``: the checkpoint's own on a GPU. On
            CPU ``auto`` is float32 for every checkpoint. Greedy output is then, token for token,
            transformers' own in float32 (of a quantised one: that of its dequantised weights). And
            float32 is fast on every CPU, half precision only on those that compute in it.
        device: ``cpu``, ``cuda``, ``cuda:1`` ... or ``auto``: CUDA if there is one.
        max_model_len: prompt and output tokens of one sequence, at most; None takes what the model
            was made for.
        native: on CPU, ``auto`` computes steps by the native library where it can. ``on`` refuses a
            model that the library cannot compute, ``off`` leaves all to torch.
        runtime: the native library and its threads, where another model has them already.
        recipe: how weights are quantised.
        prepack: on CPU and without the native library, pack the weights of large linear layers
            once for oneDNN.
        kv_cache_dtype: ``int8`` keeps keys and values in 8 bits, on a CPU; so does ``fp8``, made
            for a GPU, and on a CPU computed by torch; ``auto`` in the model's dtype.

    Raises:
        ConfigurationError: ``dtype``, ``device``, ``max_model_len``, ``native``, ``recipe`` or
            ``kv_cache_dtype`` cannot be had.
        ModelNotFound: no such directory, or no checkpoint or tokenizer in it.
        UnsupportedModel: the gate refused its architecture.
        InsufficientMemory: the weights do not fit.
        ModelError: the checkpoint is damaged or incomplete.
    """
    begin = time.perf_counter()
    folder = find_checkpoint(path)
    target = pick_device(device)
    check_kv_cache_dtype(kv_cache_dtype, target, native)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigurationError(f"dtype: got {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    with quiet():
        config = load_config(folder)
        load_gate.check_config(config)
        if recipe.method != "auto":
            recipe.check(stored_quantization(folder, config))
        context_length = _context_length(config, max_model_len)
        tokenizer = load_tokenizer(folder)
        model = load_weights(folder, config, pick_dtype(dtype, target), target)
    quantize_model(model, recipe)
    if kv_cache_dtype == "fp8" and target.type == "cpu":
        native = "off"
        log.warning("model.kv_cache_dtype: fp8 leaves a CPU's steps to PyTorch; int8 does not")
    result = adopt_model(
        model,
        tokenizer,
        folder,
        max_model_len=context_length,
        native=native,
        runtime=runtime,
        prepack=prepack,
        begin=begin,
    )
    result.recipe = recipe
    # Behind the load gate, whose trial compares with transformers in full.
    layout = result.geometry.layout.in_format(kv_cache_dtype)
    result.geometry = replace(result.geometry, layout=layout)
    if result.native is not None and layout is KVLayout.GROUPS_INT8:
        result.native.keep_kv_in_int8()
    log.info(
        "loaded %s from %s in %.1f s: %d layers, %s on %s, context of %d tokens",
        config.model_type,
        folder,
        result.load_seconds,
        len(result.geometry.layers),
        str(model.dtype).removeprefix("torch."),
        target,
        context_length,
    )
    return result


def adopt_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    max_model_len: int,
    native: str = "auto",
    runtime: NativeRuntime | None = None,
    prepack: bool = True,
    begin: float | None = None,
) -> LoadedModel:
    """Make a transformers model with weights ready to run, through every check of the load gate.

    Args:
        model: on its device, in eval mode.
        tokenizer: None for a model that takes and gives token ids only.
        path: where it comes from, for messages.
        max_model_len: prompt and output tokens of one sequence, at most.
        native: as in :func:`load_model`.
        runtime: as in :func:`load_model`.
        prepack: as in :func:`load_model`.
        begin: ``time.perf_counter()`` when loading began; None: now.

    Raises:
        ConfigurationError: ``native`` is ``on``, and the native library cannot compute it.
        UnsupportedModel: the gate refused its architecture.
        InsufficientMemory: a trial step does not fit beside the weights.
    """
    began = time.perf_counter() if begin is None else begin
    target = model.device
    with quiet():
        context, attention_name, geometry, vocab_size, trial = _attach(model, path, target)
        decoder = _native_decoder(native, model, geometry, max_model_len, trial, runtime)
    if decoder is not None:
        geometry = replace(geometry, layout=KVLayout.GROUPS)
    elif prepack and target.type == "cpu":
        logits = functools.partial(load_gate.trial_logits, model, context, geometry, vocab_size)
        prepack_linears(model, logits, available_bytes(target) // 8)
    return LoadedModel(
        model=model,
        model_type=str(model.config.model_type),
        tokenizer=tokenizer,
        device=target,
        dtype=model.dtype,
        geometry=geometry,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        vocab_size=vocab_size,
        path=path,
        context=context,
        attention_name=attention_name,
        load_seconds=time.perf_counter() - began,
        native=decoder,
    )


def _native_decoder(
    wanted: str,
    model: Any,
    geometry: KVGeometry,
    positions: int,
    trial: Trial,
    runtime: NativeRuntime | None,
) -> NativeDecoder | None:
    if wanted == "off" or (wanted == "auto" and model.device.type != "cpu"):
        return None
    laid_out = replace(geometry, layout=KVLayout.GROUPS)
    try:
        return NativeDecoder.of(model, laid_out, positions, trial, runtime)
    except NativeUnavailable as error:
        if wanted == "on":
            raise ConfigurationError(
                f"model.native: this model cannot be computed by the native library: {error}; "
                "set it to auto or off"
            ) from error
        level = logging.WARNING if isinstance(error, NoRoomToPack) else logging.INFO
        log.log(level, "computed by torch and not by the native library: %s", error)
        return None


def pick_device(device: str) -> torch.device:
    """The device that a setting names.

    Raises:
        ConfigurationError: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        target = None
    if target is None or target.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device: got {device!r}; allowed: auto, cpu, cuda, cuda:0, ...")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device: {device!r} is not there: this PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; use device cpu, or a CUDA build of PyTorch with a driver"
        )
    return target


def check_kv_cache_dtype(kv_cache_dtype: str, device: torch.device, native: str = "auto") -> None:
    """Check that a KV cache in that format can be had.

    Raises:
        ConfigurationError: it cannot, on that device or with that setting of ``model.native``.
    """
    allowed = ("auto", "int8", "fp8") if device.type == "cpu" else ("auto", "fp8")
    if kv_cache_dtype not in allowed:
        raise ConfigurationError(
            f"model.kv_cache_dtype: got {kv_cache_dtype} on {device}; allowed: {', '.join(allowed)}"
        )
    if kv_cache_dtype == "fp8" and device.type == "cpu" and native == "on":
        raise ConfigurationError(
            "model.kv_cache_dtype: got fp8 with model.native on, and the native library computes "
            "none; allowed: int8, or model.native auto, which leaves fp8 to PyTorch"
        )


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype that a setting names; ``"auto"``: the checkpoint's own."""
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.float32 if device.type == "cpu" else "auto"


def _context_length(config: Any, wanted: int | None) -> int:
    if wanted is not None and wanted < 1:
        raise ConfigurationError(f"max_model_len: got {wanted}; allowed: an integer from 1")
    text = config.get_text_config(decoder=True)
    longest, limit = getattr(text, "max_position_embeddings", None), load_gate.context_limit(config)
    if wanted is None:
        if longest is None:
            raise ConfigurationError(
                "max_model_len: the model's configuration names no context length; set it"
            )
        wanted = limit or int(longest)
        if wanted < longest:
            log.warning("context held to %d of %d tokens: %s", wanted, longest, LONGROPE_LIMIT)
        return wanted
    if longest is not None and wanted > longest:
        raise ConfigurationError(
            f"max_model_len: got {wanted}; allowed: at most {longest}, the model's context length"
        )
    if limit is not None and wanted > limit:
        raise ConfigurationError(
            f"max_model_len: got {wanted}; allowed: at most {limit}: {LONGROPE_LIMIT}"
        )
    return wanted


def _attach(
    model: Any, path: Path, device: torch.device
) -> tuple[ForwardContext, str, KVGeometry, int, Trial]:
    """Put the paged attention into ``model``, and check it with the load gate."""
    name: str | None = None
    config = model.config
    try:
        load_gate.check_attention(model)
        probe = probe_geometry(model, device)
        load_gate.check_probe(config, probe)
        context = ForwardContext()
        indices = {module: index for index, module in enumerate(probe.modules)}
        name = register(PagedAttention(context, indices))
        weakref.finalize(model, unregister, name)
        model.set_attn_implementation(name)
        trial = load_gate.check_numbers(model, name, context, probe.geometry, probe.vocab_size)
    except torch.OutOfMemoryError as error:
        raise InsufficientMemory(
            f"{device} has no memory left for a trial step beside the weights; use a smaller "
            "dtype, a quantised checkpoint or a larger device"
        ) from error
    except PenstockError as error:
        if name is not None:
            unregister(name)
        _check_finite(model, path, error)
        raise
    except Exception as error:
        if name is not None:
            unregister(name)
        log.debug("trial step failed", exc_info=True)
        raise load_gate.unsupported(config, f"a trial step fails ({one_line(error)})") from error
    return context, name, probe.geometry, probe.vocab_size, trial


def _check_finite(model: Any, path: Path, refusal: PenstockError) -> None:
    """Name the weight if one is why the model was refused, not its architecture."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError(
                f"{path}: tensor {name!r} has values that are not finite; copy the checkpoint again"
            ) from refusal


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Where ``generate`` stops: by generation_config.json, else config.json, else the tokenizer."""
    text = model.config.get_text_config(decoder=True)
    for owner in (getattr(model, "generation_config", None), model.config, text, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else map(int, ids))
    log.warning("the model names no end-of-text token: only max_tokens and stop rules end output")
    return frozenset()
