"""The models that ``bench spec`` measures: checkpoints, or random weights of a given shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.output.text_stream import TextStream
from penstock.gpu_worker.engine.plan import BlockCopy, Span
from penstock.gpu_worker.engine.sequence import Constraint
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.build import build_model
from penstock.gpu_worker.model.drafting.drafters import Drafter, DraftModel, Proposal
from penstock.gpu_worker.model.drafting.setup import load_draft
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.checkpoint_folder import DEMO, DEMO_DRAFT
from penstock.gpu_worker.model.loading.loader import LoadedModel, adopt_model, pick_device
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.settings import Settings, load_settings

from .speculation_options import SpeculationOptions
from .widened import write_widened

__all__ = ["Models", "Spoiled", "load_models", "longest_request"]

_KV_BYTES = {"cpu": 2**28}
_KV_BYTES_ELSEWHERE = 2**33
"""Of each side: they all hold their sequences at the same time."""

_BLOCK_SIZE = 16
_MOST_PROMPT = 600
"""Tokens of the longest prompt of any workload, and some more."""

_SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "7b": (
        {"hidden": 4096, "mlp": 11008, "layers": 32, "heads": 32, "vocab": 32000},
        {"hidden": 1024, "mlp": 2816, "layers": 4, "heads": 16, "vocab": 32000},
    ),
    "small": (
        {"hidden": 256, "mlp": 688, "layers": 4, "heads": 8, "vocab": 4096},
        {"hidden": 64, "mlp": 176, "layers": 1, "heads": 2, "vocab": 4096},
    ),
}
"""Llamas of random weights: the target, of which 7b is that of Llama 2 7B, and its draft."""


@dataclass(frozen=True, slots=True)
class Models:
    """A target and its draft, ready to run.

    Attributes:
        target: the model.
        draft: its draft model; None without one.
        config: of an engine that chooses drafts by itself.
        encode: text to ids; None for a model that knows no text.
        compile: what follows the form that options ask for.
        new_text_stream: an incremental detokeniser of one output.
        acceptance: share of the draft's proposals that are left right; None: they are its own.
        notes: what they are.
        folder: the target's checkpoint, if it was made for this; it goes with this object.
    """

    target: LoadedModel
    draft: LoadedModel | None
    config: EngineConfig
    encode: Callable[[str], Sequence[int]] | None
    compile: Callable[[SamplingOptions], Callable[[], Constraint] | None]
    new_text_stream: Callable[[tuple[int, ...]], TextStream]
    acceptance: float | None
    notes: tuple[str, ...]
    folder: TemporaryDirectory[str] | None = None

    @property
    def speculation(self) -> SpeculationConfig:
        """What an engine that chooses by itself may draft."""
        assert self.config.speculation is not None
        return self.config.speculation

    def new_runner(self) -> ModelRunner:
        """A runner with KV, and a drafter, of its own."""
        target, config, draft = self.target, self.config, self.draft
        drafter: Drafter | None = None if draft is None else _drafter(draft, target, config)
        if drafter is not None and self.acceptance is not None:
            drafter = Spoiled(drafter, self.acceptance, target.vocab_size)
        return ModelRunner(target, _pool(target, config), drafter=drafter)


class Spoiled:
    """Leaves each proposal of a drafter as it is with a given chance, and else makes it wrong.

    Args:
        inner: proposes what is right.
        right: the chance.
        vocab_size: of the target.
    """

    def __init__(self, inner: Drafter, right: float, vocab_size: int) -> None:
        self._inner, self._right, self._vocab_size = inner, right, vocab_size
        self._random = random.Random(7)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See :class:`Drafter`."""
        self._inner.copy_blocks(copies)

    def propose(self, spans: Sequence[Span]) -> list[Proposal]:
        """See :class:`Drafter`."""
        return [Proposal(self._spoil(of.token_ids)) for of in self._inner.propose(spans)]

    def _spoil(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            i if self._random.random() < self._right else (i + 1) % self._vocab_size
            for i in token_ids
        )


def load_models(options: SpeculationOptions) -> Models:
    """Load or make them; the CPU threads are chosen, too.

    Raises:
        ModelError: a model cannot be loaded.
    """
    if options.shape is not None:
        return _random_models(options, options.shape)
    notes: tuple[str, ...] = ()
    folder = None
    if options.widen > 1:
        notes = (f"{options.model}, with MLPs {options.widen} times as wide: the same text",)
        folder = TemporaryDirectory()
        write_widened(options.model, options.widen, Path(folder.name))
    settings = _settings(options, None if folder is None else folder.name)
    served = build_model(settings)
    assert isinstance(served.runner, ModelRunner)
    target = served.runner.loaded
    return Models(
        target=target,
        draft=load_draft(settings, target),
        config=served.config,
        encode=lambda text: served.encode(Request(id="bench", prompt=text)),
        compile=served.compile,
        new_text_stream=served.new_text_stream,
        acceptance=None,
        notes=(served.summary, *notes),
        folder=folder,
    )


def longest_request(options: SpeculationOptions) -> int:
    """Tokens of prompt and output of a request, at most."""
    return _MOST_PROMPT + 2 * options.tokens


def _settings(options: SpeculationOptions, widened: str | None) -> Settings:
    draft = options.draft
    if widened is not None and (options.model, draft) == (DEMO, "auto"):
        draft = DEMO_DRAFT
    return load_settings(
        {
            "model.path": options.model if widened is None else widened,
            "model.dtype": options.dtype,
            "model.start_record": "on" if widened is None else "off",
            "speculation.draft_model": draft,
            "model.device": options.device,
            "engine.max_sequences": max(*options.batches, 4),
            "engine.max_batch_tokens": 2048,
            "engine.block_size": _BLOCK_SIZE,
            "engine.prefix_cache": False,
            "engine.threads": options.threads,
            "engine.kv_memory": _KV_BYTES.get(options.device, _KV_BYTES_ELSEWHERE),
            "worker.log_level": "error",
        }
    )


def _random_models(options: SpeculationOptions, shape: str) -> Models:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    of_target, of_draft = _SHAPES[shape]
    target, draft = (_random_model(of, device, options) for of in (of_target, of_draft))
    most, longest = max(*options.batches, 4), longest_request(options)
    config = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=(most + 1) * -(-(longest + 16) // _BLOCK_SIZE),
        max_batch_tokens=2048,
        max_sequences=most,
        chunk_size=2048,
        max_model_len=longest,
        eos_token_ids=target.eos_token_ids,
        vocab_size=target.vocab_size,
        prefix_cache=False,
        speculation=SpeculationConfig(ngram=False, draft=True),
    )
    kind = str(target.dtype).removeprefix("torch.")
    note = (
        f"SYNTHETIC: random weights in {kind} on {device}, a target of {_billions(target):.3g} and "
        f"a draft of {_billions(draft):.3g} billion parameters; a bias decides every token, and "
        f"each draft is made wrong with chance {1 - options.acceptance:.2g}"
    )
    return Models(
        target=target,
        draft=draft,
        config=config,
        encode=None,
        compile=lambda _: None,
        new_text_stream=lambda _: _NoText(),
        acceptance=options.acceptance,
        notes=(note,),
    )


def _billions(loaded: LoadedModel) -> float:
    count: int = sum(tensor.numel() for tensor in loaded.model.parameters())
    return count / 1e9


def _random_model(
    shape: dict[str, int], device: torch.device, options: SpeculationOptions
) -> LoadedModel:
    longest = longest_request(options)
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        max_position_embeddings=max(longest, 2048),
        eos_token_id=2,
    )
    before, dtype = torch.get_default_dtype(), torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16
    devices = [device] if device.type == "cuda" else []
    try:
        torch.set_default_dtype(dtype)
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(5)
            model: Any = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return adopt_model(model, None, Path("random"), max_model_len=longest)


def _pool(loaded: LoadedModel, config: EngineConfig) -> KVPool:
    size = config.block_size
    return KVPool(loaded.geometry, config.kv_cache_groups, size, loaded.device, loaded.dtype)


def _drafter(draft: LoadedModel, target: LoadedModel, config: EngineConfig) -> DraftModel:
    size = config.block_size
    pool = KVPool(draft.geometry, config.num_blocks, size, draft.device, draft.dtype)
    return DraftModel(draft, pool, None, target, max_read=config.max_batch_tokens)


class _NoText:
    """The text of a model that knows none."""

    def feed(self, token_id: int) -> str:  # noqa: ARG002
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""
