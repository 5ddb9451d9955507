"""The model in this process: by our engine, and by transformers' own ``generate``."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.model.build import build_model
from penstock.gpu_worker.model.loading.checkpoint import find_checkpoint, quiet
from penstock.shared.settings import Settings

from .traces import Item, Trace, requests_of, uniform_trace

__all__ = ["EngineSide", "TransformersSide"]

_PAD = 0


class EngineSide:
    """Our engine and runner, without Redis.

    Args:
        settings: of the model and its engine; with ``engine.threads`` None the faster number wins.

    Attributes:
        threads: CPU threads in use.
        summary: the served model in a line.
    """

    def __init__(self, settings: Settings) -> None:
        self._served = build_model(settings)
        self.threads = torch.get_num_threads()
        self.summary = self._served.summary

    def run(self, trace: Trace, slots: int) -> tuple[float, list[float]]:
        """Generate a trace whose requests all wait from the start.

        Args:
            trace: what to generate.
            slots: sequences that run at the same time; at most the settings' ``max_sequences``.

        Returns:
            Total seconds, and the seconds of each step.
        """
        torch.set_num_threads(self.threads)
        config = dataclasses.replace(self._served.config, max_sequences=slots)
        engine, steps = Engine(config, self._served.new_text_stream), []
        began = now = time.perf_counter()
        for request in requests_of(trace, "run"):
            assert isinstance(request.prompt, tuple)
            engine.add(
                EngineRequest(
                    id=request.id,
                    lane=request.lane,
                    tenant=request.tenant,
                    prompt_ids=tuple(self._served.encode(request)),
                    options=request.options,
                    seed=request.seed,
                    arrival=began,
                )
            )
        tokens = 0
        while plan := engine.schedule():
            updates = engine.collect(plan, self._served.runner.run(plan))
            tokens += sum(len(update.token_ids) for update in updates)
            before, now = now, time.perf_counter()
            steps.append(now - before)
        assert tokens == sum(item.max_tokens for item in trace)
        return now - began, steps


class TransformersSide:
    """The same checkpoint by transformers alone: sdpa attention, static batches.

    Args:
        model: directory, or ``demo``.
        threads: numbers of CPU threads to choose the fastest from.

    Attributes:
        threads: the one chosen.
    """

    def __init__(self, model: str, threads: Sequence[int]) -> None:
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                find_checkpoint(model),
                dtype=torch.float32,
                attn_implementation="sdpa",
                local_files_only=True,
            )
        self._model.eval().requires_grad_(False)
        self._model.generation_config = GenerationConfig()
        self.threads = threads[0]
        if len(threads) > 1:
            self.threads = min(threads, key=self._time)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        size: int = self._model.config.vocab_size
        return size

    def run(self, trace: Trace, slots: int) -> float:
        """Generate a trace in batches of ``slots``, in order, each as long as its longest.

        Returns:
            Seconds.
        """
        torch.set_num_threads(self.threads)
        began = time.perf_counter()
        for start in range(0, len(trace), slots):
            self._generate(trace[start : start + slots])
        return time.perf_counter() - began

    def _time(self, threads: int) -> float:
        self.threads = threads
        trace = uniform_trace(random.Random(0), self.vocab_size, count=8, prompt=16, tokens=12)
        self.run(trace, 8)
        return min(self.run(trace, 8) for _ in range(3))

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Item]) -> None:
        longest = max(len(item.prompt_ids) for item in batch)
        padding = [longest - len(item.prompt_ids) for item in batch]
        ids = [
            [_PAD] * pad + list(item.prompt_ids) for pad, item in zip(padding, batch, strict=True)
        ]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        tokens = max(item.max_tokens for item in batch)
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=_PAD
        )
        with quiet():
            output = self._model.generate(
                torch.tensor(ids), attention_mask=torch.tensor(mask), generation_config=config
            )
        assert output.shape == (len(batch), longest + tokens)
