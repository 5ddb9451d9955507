"""Opens the model that a worker serves, from an earlier start's record or by transformers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.cpu import NativeUnavailable
from penstock.kernels.kv_layout import KVLayout

from ..forward.batch import Rows, SequenceChunk, pack
from ..forward.forward_context import ForwardContext
from ..kv.kv_pool import KVPool
from ..program.native_decoder import NativeDecoder, NativeRuntime, NoRoomToPack
from ..quantization.form import QuantizedWeight
from ..quantization.recipe import AUTO, Recipe
from ..text.deferred_tokenizer import DeferredTokenizer
from ..text.fast_detokenize import is_plain
from .checkpoint_folder import find_checkpoint
from .geometry import KVGeometry
from .loaded_model import LoadedModel
from .model_record import CheckpointWeights, ModelRecord, RecordStore

__all__ = ["OpenedModel", "is_on_cpu", "open_model"]

log = logging.getLogger(__name__)

_PROOF_TOKENS = 24
_PROOF_BLOCK = 8


class OpenedModel(NamedTuple):
    """A model, and whether an earlier start recorded it.

    Attributes:
        loaded: the model.
        is_known: it comes from a record, so an earlier start ran all trials of it.
        remember: records the model. Does nothing if it is known or cannot be recorded.
    """

    loaded: LoadedModel
    is_known: bool
    remember: Callable[[], None]


def open_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    native: str = "auto",
    runtime: NativeRuntime | None = None,
    recipe: Recipe = AUTO,
    records: bool = True,
    cache: Path | None = None,
    kv_cache_dtype: str = "auto",
    keep_packed: bool = False,
) -> OpenedModel:
    """Open a checkpoint. Errors are those of :func:`.loader.load_model`.

    Args:
        path: of the checkpoint.
        dtype: see :func:`.loader.load_model`, also for the next five.
        device: see ``dtype``.
        max_model_len: see ``dtype``.
        native: see ``dtype``.
        runtime: see ``dtype``.
        recipe: see ``dtype``.
        records: whether to use a record, and to make one.
        cache: see :class:`.RecordStore`.
        kv_cache_dtype: see ``dtype``.
        keep_packed: keep packed weights with the record, and map them at a later start.
    """
    begin = time.perf_counter()
    store: RecordStore | None = None
    # What the native library computes is recorded, and it knows no fp8.
    if records and native != "off" and kv_cache_dtype != "fp8" and is_on_cpu(device):
        folder = find_checkpoint(path)
        try:
            runtime = NativeRuntime() if runtime is None else runtime
            library = runtime.library.path.name
            parts = {
                "dtype": dtype,
                "length": max_model_len,
                "library": library,
                "quantization": f"{recipe.method} {recipe}",
                "kv": kv_cache_dtype,
            }
            store = RecordStore(folder, parts, cache)
            known = _from_record(folder, store, runtime, recipe, begin, keep_packed=keep_packed)
            if known is not None:
                return known
        except NativeUnavailable:
            runtime = None  # load_model says why
    from .loader import load_model

    loaded = load_model(
        path,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        native=native,
        runtime=runtime,
        recipe=recipe,
        kv_cache_dtype=kv_cache_dtype,
    )
    return OpenedModel(loaded, False, lambda: _save(store, loaded, keep_packed=keep_packed))


def is_on_cpu(device: str) -> bool:
    """Whether a model with this setting of its device runs on the CPU."""
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _from_record(
    folder: Path,
    store: RecordStore,
    runtime: NativeRuntime,
    recipe: Recipe,
    begin: float,
    *,
    keep_packed: bool,
) -> OpenedModel | None:
    record = store.load()
    if record is None:
        return None
    maps = keep_packed and record.packed is not None
    try:
        if maps:
            native = _mapped_decoder(folder, record, runtime)
        else:
            native = _decoder(folder, record, runtime, recipe)
        if record.geometry.layout is KVLayout.GROUPS_INT8:
            native.keep_kv_in_int8()
        proof = _proof(native, record.geometry, record.dtype, record.vocab_size)
    except NoRoomToPack as error:
        log.warning("%s", error)
        return None
    except Exception as error:
        log.warning("the start-up record of %s does not fit it: %s", folder, error)
        store.forget()
        return None
    if not torch.equal(proof, record.proof):
        log.warning("%s gives other logits than at its last start; it is tried anew", folder)
        store.forget()
        return None
    loaded = LoadedModel(
        model=None,
        model_type=record.model_type,
        tokenizer=_tokenizer(folder, record),
        device=torch.device("cpu"),
        dtype=record.dtype,
        geometry=record.geometry,
        max_model_len=record.max_model_len,
        eos_token_ids=record.eos_token_ids,
        vocab_size=record.vocab_size,
        path=folder,
        context=ForwardContext(),
        attention_name=None,
        load_seconds=time.perf_counter() - begin,
        native=native,
        recipe=recipe,
    )
    log.info("loaded %s in %.1f s, as recorded by an earlier start", folder, loaded.load_seconds)
    if keep_packed and not maps:
        return OpenedModel(loaded, True, lambda: store.save(record, native.program.write_weights))
    return OpenedModel(loaded, True, lambda: None)


def _decoder(
    folder: Path, record: ModelRecord, runtime: NativeRuntime, recipe: Recipe
) -> NativeDecoder:
    weights = CheckpointWeights(folder, record.dtype)
    source = weights.quantized()

    def stored(module: str, shape: tuple[int, int]) -> QuantizedWeight:
        if source is None:
            raise KeyError(module)
        return source.weight(module, shape)

    decoder = record.decoder.decoder(weights.read, recipe.quantize, stored)
    # The program keeps the embedding: a view would keep the files mapped.
    decoder = replace(decoder, embedding=decoder.embedding.clone())
    return NativeDecoder.of_description(decoder, record.dtype, runtime, forms=record.forms)


def _mapped_decoder(folder: Path, record: ModelRecord, runtime: NativeRuntime) -> NativeDecoder:
    """The same with the packed weights of an earlier start; the recipe is part of the record."""
    weights = CheckpointWeights(folder, record.dtype)
    decoder = record.decoder.mapped_decoder(weights.read, weights.shape)
    decoder = replace(decoder, embedding=decoder.embedding.clone())
    return NativeDecoder.of_description(decoder, record.dtype, runtime, record.packed)


def _tokenizer(folder: Path, record: ModelRecord) -> object:
    if record.plain_tokenizer:
        return DeferredTokenizer(folder, _transformers_tokenizer)
    return _transformers_tokenizer(folder)


def _transformers_tokenizer(folder: Path) -> object:
    from .checkpoint import load_tokenizer, quiet

    with quiet():
        return load_tokenizer(folder)


def _save(store: RecordStore | None, loaded: LoadedModel, *, keep_packed: bool) -> None:
    if store is None or loaded.native is None or loaded.native.record is None:
        return
    weights = CheckpointWeights(loaded.path, loaded.dtype)
    if any(name not in weights for name in loaded.native.record.weight_names()):
        return  # converted or renamed when it was loaded
    modules = loaded.native.record.stored_modules()
    source = weights.quantized() if modules else None
    if modules and (source is None or not modules <= source.modules):
        return
    store.save(
        ModelRecord(
            model_type=loaded.model_type,
            decoder=loaded.native.record,
            geometry=loaded.geometry,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            dtype=loaded.dtype,
            plain_tokenizer=is_plain(loaded.tokenizer, loaded.path),
            proof=_proof(loaded.native, loaded.geometry, loaded.dtype, loaded.vocab_size),
            forms=loaded.native.program.forms,
        ),
        loaded.native.program.write_weights if keep_packed else None,
    )


@torch.inference_mode()
def _proof(
    native: NativeDecoder, geometry: KVGeometry, dtype: torch.dtype, vocab_size: int
) -> Tensor:
    """Logits of a prefill's last token and of a decode step's one, ``[2, vocab]``."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (_PROOF_TOKENS,), generator=generator).tolist()
    last, blocks = len(ids) - 1, list(range(-(-len(ids) // _PROOF_BLOCK)))
    pool = KVPool(geometry, len(blocks), _PROOF_BLOCK, torch.device("cpu"), dtype)
    steps = (
        SequenceChunk(ids[:last], 0, [blocks], Rows.LAST),
        SequenceChunk(ids[last:], last, [blocks], Rows.LAST),
    )
    return torch.cat([native.forward(pack([chunk], pool), pool) for chunk in steps])
