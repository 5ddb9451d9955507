"""``--model synthetic``: a worker without a model, for load tests and fault storms.

Everything but the arithmetic is the real worker: protocol, scheduler, block manager, stop rules.
The next token is a hash of (seed, index, last token). So a stream that another worker continued can
be checked against an undisturbed one. It starts in a fraction of a second and imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.settings import Settings
from penstock.shared.synthetic import SYNTHETIC, next_token

from ..engine.output.step_output import StepOutput
from ..engine.output.text_stream import AnswerParser, PlainAnswer
from ..engine.plan import Plan
from ..engine.sequence import Sequence
from .engine_settings import engine_config
from .model_interface import ServingModel

__all__ = ["SyntheticRunner", "build_synthetic"]

_CONTEXT = 1 << 16


class SyntheticRunner:
    """Samples by hash; a step takes at least ``step_s`` seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        """One token per span that samples."""
        ends = time.perf_counter() + self._step_s
        if meanwhile is not None:
            meanwhile()
        if (left := ends - time.perf_counter()) > 0:
            time.sleep(left)
        token_ids = tuple((_sample(span.sequence),) if span.samples else () for span in plan.spans)
        sampled = [(s.sequence, ids) for s, ids in zip(plan.spans, token_ids, strict=True) if ids]
        return StepOutput(
            token_ids,
            logprobs={
                sequence: (_report(*ids, sequence.options.logprobs),)
                for sequence, ids in sampled
                if sequence.options.logprobs is not None
            },
            prompt_logprobs={
                span.sequence: tuple(
                    _report(span.sequence.token_ids[row + 1], width) for row in span.prompt_rows
                )
                for span in plan.spans
                if (width := span.sequence.options.prompt_logprobs) is not None
            },
            candidates={
                sequence: _likeliest(*ids, sequence.num_candidates)
                for sequence, ids in sampled
                if sequence.num_candidates
            },
        )

    def prepare(self, plan: Plan) -> None:
        """A step takes nothing but its time."""

    def recover(self) -> None:
        """A step leaves nothing behind."""


def _sample(sequence: Sequence) -> int:
    index, last = sequence.num_output_tokens, sequence.token_ids[-1]
    return next_token(sequence.seed, index, last, sequence.choice)


def _report(token_id: int, width: int) -> TokenLogprobs:
    return TokenLogprobs(_logprob(token_id), _likeliest(token_id, width))


def _likeliest(token_id: int, width: int) -> tuple[tuple[int, float], ...]:
    """The given number of tokens in falling likelihood; no distribution stands behind them."""
    return tuple((token_id + rank, _logprob(token_id) - rank) for rank in range(width))


def _logprob(token_id: int) -> float:
    return -(token_id % 7) / 8


class _Letters:
    """Detokeniser: a token id is a code point."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        del prompt_ids  # a code point has no context

    def feed(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def _encode(request: Request) -> Seq[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [ord(character) for character in prompt]
    if isinstance(prompt[0], int):
        for index, token in enumerate(prompt):
            if token > 0x10FFFF:
                raise InvalidRequest(f"prompt[{index}]", token, "a Unicode code point")
        return prompt
    texts = [message["content"] for message in cast(tuple[dict[str, str], ...], prompt)]
    return [ord(character) for text in texts for character in text + "\n"]


def _parser(request: Request, prompt_ids: Seq[int]) -> Callable[[], AnswerParser]:
    del request, prompt_ids
    return PlainAnswer


def _refuse_forms(options: SamplingOptions) -> None:
    if (field := options.constraint) is not None:
        raise InvalidRequest(field, getattr(options, field), "nothing: there is no model here")


def _refuse_calls(request: Request, prompt_ids: Seq[int]) -> SamplingOptions:
    del prompt_ids
    raise InvalidRequest("tools", request.chat.tools, "nothing: there is no model here")


def build_synthetic(settings: Settings) -> ServingModel:
    """A ``ServingModel`` whose steps take ``model.synthetic_step_ms``."""
    step_ms = settings.model.synthetic_step_ms
    config = engine_config(
        settings.engine,
        num_blocks=max(1, (1 << 20) // settings.engine.block_size),
        max_model_len=settings.model.max_model_len or _CONTEXT,
        auto_batch_tokens=2048,
    )
    config = replace(config, preemption="recompute")  # there is no KV, so nothing to copy
    return ServingModel(
        config=config,
        runner=SyntheticRunner(step_ms / 1000),
        encode=_encode,
        compile=_refuse_forms,
        parser=_parser,
        constrain=_refuse_calls,
        decode=lambda token_ids: "".join(map(chr, token_ids)),
        new_text_stream=_Letters,
        fingerprint=SYNTHETIC,
        summary=f"no model: synthetic tokens, {step_ms:g} ms a step",
        overlaps=True,
    )
