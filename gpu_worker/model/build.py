"""Builds what a worker serves from its settings: checkpoint, KV pool, runner, engine limits."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from penstock.shared.errors import ModelError
from penstock.shared.local.cores import usable_cores
from penstock.shared.local.yielding import yielding_to_others
from penstock.shared.protocol.request import Request
from penstock.shared.settings import EngineSettings, ModelSettings, Settings

from ..engine.config import EngineConfig
from ..engine.kv.kv_cache_groups import KVCacheGroup
from ..engine.output.text_stream import TextStream
from ..engine_process.engine_settings import engine_config
from ..engine_process.model_interface import ServingModel
from .compute_threads import set_compute_threads
from .drafting.drafters import DraftModel
from .drafting.setup import load_draft, speculation_config
from .kv.kv_pool import KVPool, blocks_in_budget
from .kv.layer_groups import groups_in_budget
from .kv.memory_budget import format_bytes, kv_budget, swap_budget
from .kv.swap_pool import SwapPool
from .loading.checkpoint_folder import find_checkpoint, is_quantized
from .loading.fingerprint import fingerprint_of
from .loading.geometry import KVGeometry
from .loading.loaded_model import LoadedModel
from .loading.model_opening import is_on_cpu, open_model
from .quantization.recipe import recipe_of, resolve_preferences
from .runner import ModelRunner
from .structured.compile_sandbox import CompileSandbox, UnsafeConstraint
from .structured.constraint_compiler import ConstraintCompiler
from .structured.mask_maker import MaskMaker
from .structured.matcher import ConstraintError
from .structured.template_renderer import TemplateRenderer
from .text.answer_format import AnswerFormat
from .text.byte_level_detokenizer import ByteLevelDetokenizer, byte_level_words
from .text.chat_prompt import ChatPrompt
from .text.deferred_tokenizer import DeferredTokenizer
from .text.detokenizer import IncrementalDetokenizer
from .text.fast_detokenize import decoder_of
from .text.prompt_tokenizer import encode_prompt
from .text.token_bytes import token_bytes

__all__ = ["build_model"]

_log = logging.getLogger("penstock.model")

_CPU_BATCH_TOKENS = 256
_GPU_BATCH_TOKENS = 2048
_TYPICAL_BATCH = 8


def build_model(settings: Settings) -> ServingModel:
    """Load the checkpoint, size its KV pool and run it once. Takes seconds to minutes.

    Raises:
        ModelError: the checkpoint is missing, refused by the load gate, or does not fit.
        ConfigurationError: a setting contradicts the model or another setting.
    """
    set_compute_threads(settings.engine.threads)
    wanted = _resolved(settings.model)
    opened = open_model(
        wanted.path,
        dtype=wanted.dtype,
        device=wanted.device,
        max_model_len=wanted.max_model_len,
        native=wanted.native,
        recipe=recipe_of(wanted),
        records=wanted.start_record == "on",
        kv_cache_dtype=wanted.kv_cache_dtype,
        keep_packed=wanted.packed_weights == "disk",
    )
    loaded = opened.loaded
    constraints = ConstraintCompiler(
        loaded.tokenizer,
        loaded.vocab_size,
        loaded.eos_token_ids,
        limit_s=settings.engine.constraint_timeout_s,
    )
    if settings.engine.cores is not None and loaded.native is not None:
        loaded.native.runtime.pin_threads()
    if not opened.is_known:
        constraints.sandbox.start()
    draft = load_draft(settings, loaded)
    config = _engine_config(settings.engine, loaded, draft)
    pool = KVPool(
        loaded.geometry, config.kv_cache_groups, config.block_size, loaded.device, loaded.dtype
    )
    num_host_blocks = [group.num_host_blocks for group in config.kv_cache_groups]
    swap_pool = SwapPool(pool, num_host_blocks) if any(num_host_blocks) else None
    masks = MaskMaker(
        _mask_threads(),
        wait_s=settings.engine.constraint_wait_ms / 1000,
        limit_s=settings.engine.constraint_timeout_s,
    )
    rejection = settings.speculation.verification == "rejection"
    drafter = None if draft is None else _drafter(draft, loaded, config, rejection)
    runner = ModelRunner(
        loaded, pool, swap_pool=swap_pool, masks=masks, drafter=drafter, rejection=rejection
    )
    chat_prompt = ChatPrompt(loaded.tokenizer, TemplateRenderer(constraints.sandbox))
    if not opened.is_known:
        chat_prompt.prepare()
        runner.warm_up(max_batch_tokens=config.max_batch_tokens, max_sequences=config.max_sequences)
        _check_chat_template(loaded, constraints.sandbox)
    opened.remember()
    if settings.engine.threads is None and loaded.device.type == "cpu":
        _choose_threads(runner, repeats=2 if opened.is_known else 5)
    speculation = speculation_config(settings, has_draft_model=draft is not None)
    # A fast tokenizer sets up its truncation at the first call, which two threads must not share.
    loaded.tokenizer("warm-up")
    kv = " and ".join(_group_summary(group, config.block_size) for group in config.kv_cache_groups)
    in_8_bits = loaded.geometry.layout.number_format
    summary = (
        f"{loaded.path.name} in {_number_format(loaded)} on {loaded.device}, "
        f"context {loaded.max_model_len}, KV for {kv} ({format_bytes(pool.num_bytes)}"
        f"{'' if in_8_bits is None else f' in {in_8_bits}'}), "
        f"{'computed by torch' if loaded.native is None else loaded.native.summary}"
    )
    answers = AnswerFormat(loaded.tokenizer, loaded.model_type)
    vocabulary = token_bytes(loaded.tokenizer, loaded.vocab_size)
    return ServingModel(
        config=replace(config, speculation=speculation),
        runner=runner,
        encode=_encoder(loaded, chat_prompt),
        compile=constraints.compile,
        prepare_compiler=constraints.prepare,
        parser=answers.parser,
        constrain=answers.constrain,
        decode=answers.decode,
        new_text_stream=_text_streams(loaded, vocabulary),
        summary=summary.replace("torch.", ""),
        fingerprint=_fingerprint(loaded),
        vocabulary=vocabulary,
        overlaps=loaded.overlaps,
        load_rest=(
            functools.partial(_start_load_rest, loaded, constraints, chat_prompt)
            if opened.is_known
            else None
        ),
    )


def _resolved(wanted: ModelSettings) -> ModelSettings:
    quantized = is_quantized(find_checkpoint(wanted.path))
    return resolve_preferences(wanted, quantized=quantized, on_cpu=is_on_cpu(wanted.device))


def _text_streams(
    loaded: LoadedModel, vocabulary: tuple[bytes | None, ...]
) -> Callable[[tuple[int, ...]], TextStream]:
    words = byte_level_words(loaded.tokenizer, vocabulary)
    if words is not None:
        return functools.partial(ByteLevelDetokenizer, words)
    return functools.partial(IncrementalDetokenizer, decoder_of(loaded.tokenizer))


def _fingerprint(loaded: LoadedModel) -> str:
    rounding = str(loaded.recipe)
    if loaded.geometry.layout.number_format is not None:
        rounding = f"{rounding} kv={loaded.geometry.layout.number_format}"
    return fingerprint_of(loaded.path, str(loaded.dtype), rounding)


def _number_format(loaded: LoadedModel) -> str:
    if not loaded.recipe.quantizes:
        return str(loaded.dtype)
    return f"{loaded.recipe.method} ({loaded.dtype} beside it)"


def _encoder(loaded: LoadedModel, chat_prompt: ChatPrompt) -> Callable[[Request], Sequence[int]]:
    """Encodes the prompts of requests."""

    def encode(request: Request) -> Sequence[int]:
        return encode_prompt(
            loaded.tokenizer,
            request.prompt,
            vocab_size=loaded.vocab_size,
            chat_prompt=chat_prompt,
            chat=request.chat,
        )

    return encode


def _check_chat_template(loaded: LoadedModel, sandbox: CompileSandbox) -> None:
    """Compile the checkpoint's chat templates where that harms nothing, before any request does.

    A malformed one is no reason to refuse the model: chat messages are refused with its error.

    Raises:
        ModelError: compiling one crashes or takes too long.
    """
    found = getattr(loaded.tokenizer, "chat_template", None) or {}
    for template in found.values() if isinstance(found, dict) else (found,):
        try:
            sandbox.check_chat_template(template)
        except UnsafeConstraint as error:
            raise ModelError(
                f"the chat template in {loaded.path} is unusable: {error}; correct it in the "
                "tokenizer's files"
            ) from error
        except ConstraintError as error:
            _log.warning("the chat template in %s is malformed: %s", loaded.path, error)


def _mask_threads() -> int:
    """Few suffice for masks of microseconds; at least two, lest a slow one hold up others."""
    return min(8, max(2, usable_cores() // 2))


def _start_load_rest(
    loaded: LoadedModel, constraints: ConstraintCompiler, chat_prompt: ChatPrompt
) -> None:
    threading.Thread(
        target=_load_rest, args=(loaded, constraints, chat_prompt), name="load-rest", daemon=True
    ).start()


def _load_rest(
    loaded: LoadedModel, constraints: ConstraintCompiler, chat_prompt: ChatPrompt
) -> None:
    """What only some requests need: they wait for it, and others do not."""
    try:
        constraints.sandbox.start()
        with yielding_to_others():
            if isinstance(loaded.tokenizer, DeferredTokenizer):
                loaded.tokenizer.load_rest()
            chat_prompt.prepare()
    except Exception:  # tried again, and reported, by the first request that needs it
        _log.exception("what chat messages and constraints need cannot be loaded")


def _choose_threads(runner: ModelRunner, repeats: int) -> None:
    """Choose one thread or all, by timing a decode step.

    A small model's operations end before a thread pool wakes up. On a shared machine, threads that
    wait for each other cost several times more than they gain. So all must be clearly faster.
    """
    most = torch.get_num_threads()
    seconds = {}
    for threads in {1, most}:
        torch.set_num_threads(threads)
        seconds[threads] = runner.time_decode(_TYPICAL_BATCH, repeats=repeats)
    chosen = most if seconds[most] < 0.9 * seconds[1] else 1
    torch.set_num_threads(chosen)
    _log.info(
        "using %d of %d threads: a decode step of %d sequences takes %.1f ms with one, %.1f ms "
        "with all", chosen, most, _TYPICAL_BATCH, 1000 * seconds[1], 1000 * seconds[most],
    )  # fmt: skip


def _drafter(
    draft: LoadedModel, target: LoadedModel, config: EngineConfig, rejection: bool
) -> DraftModel:
    pool = KVPool(draft.geometry, config.num_blocks, config.block_size, draft.device, draft.dtype)
    max_read = config.max_batch_tokens
    return DraftModel(draft, pool, None, target, max_read=max_read, independent=rejection)


def _engine_config(
    settings: EngineSettings, loaded: LoadedModel, draft: LoadedModel | None
) -> EngineConfig:
    on_gpu = loaded.device.type == "cuda"
    mapped = 0 if loaded.native is None else loaded.native.program.mapped_bytes
    budget = kv_budget(settings.kv_memory, loaded.device, reserved=mapped)
    beside = None if draft is None else draft.geometry
    default_tokens = _GPU_BATCH_TOKENS if on_gpu else _CPU_BATCH_TOKENS
    config = engine_config(
        settings,
        num_blocks=blocks_in_budget(
            loaded.geometry, settings.block_size, loaded.dtype, budget, beside
        ),
        max_model_len=loaded.max_model_len,
        auto_batch_tokens=default_tokens,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
    )
    # Once every sequence can have a whole context, more blocks only cost start-up time.
    groups = groups_in_budget(
        loaded.geometry if draft is None else _readable_by_draft(loaded.geometry),
        loaded.dtype,
        budget,
        config,
        use_all=settings.kv_memory is not None,
        draft=beside,
    )
    if settings.preemption != "recompute":
        num_bytes = sum(group.num_blocks * group.block_bytes for group in groups)
        share = swap_budget(settings.swap_memory, num_bytes, loaded.device) / num_bytes
        groups = tuple(
            replace(group, num_host_blocks=int(share * group.num_blocks)) for group in groups
        )
    first, *more = groups
    return replace(
        config,
        num_blocks=first.num_blocks,
        window=first.window,
        num_host_blocks=first.num_host_blocks,
        block_bytes=first.block_bytes,
        more_kv_cache_groups=tuple(more),
    )


def _readable_by_draft(geometry: KVGeometry) -> KVGeometry:
    """A geometry with at least one layer that keeps everything, for a draft model beside it.

    The draft model's KV lies in the blocks of the first KV cache group. If some layer sees
    everything, that group keeps everything, and layers with a window give up what left it. If none
    does, all layers keep everything: a draft model that begins late, or after a preemption, would
    find the beginning gone.
    """
    if any(layer.window is None for layer in geometry.layers):
        return geometry
    return replace(geometry, layers=tuple(replace(layer, window=None) for layer in geometry.layers))


def _group_summary(group: KVCacheGroup, block_size: int) -> str:
    tokens = f"{group.num_blocks * block_size} tokens"
    return tokens if group.window is None else f"{tokens} in windows of {group.window}"
