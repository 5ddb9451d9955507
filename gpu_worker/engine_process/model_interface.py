"""The interface between a worker and its model, without tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions

from ..engine.config import EngineConfig
from ..engine.output.text_stream import AnswerParser, TextStream
from ..engine.sequence import Constraint
from .isolation import Runner

__all__ = ["ServingModel"]


@dataclass(frozen=True, slots=True)
class ServingModel:
    """A model that is ready to serve.

    Attributes:
        config: limits for the engine.
        runner: computes plans; warmed up.
        encode: a request's prompt (text, ids or messages) to token ids; raises ``InvalidRequest``.
        compile: what is needed to follow the form that a request's output must have, see
            :attr:`EngineRequest.new_constraint`; raises ``InvalidRequest``.
        parser: what is needed to parse the answer to a request, given its prompt's ids, see
            :attr:`EngineRequest.new_parser`; raises ``InvalidRequest``.
        constrain: given the prompt's ids, the options of a request whose tools ask for a form of
            the output, with a constraint to it. Raises ``InvalidRequest``.
        decode: token ids to their text, special tokens included.
        new_text_stream: an incremental detokeniser of one output, given the prompt's ids.
        summary: one line for the log.
        fingerprint: two models that may give different tokens have different ones.
        prepare_compiler: waits for what ``compile`` needs for any request, which takes seconds the
            first time. None: it needs nothing.
        vocabulary: bytes of its tokens by id, for readers; empty if they are not known.
        load_rest: starts to load what only some requests need, and returns at once; loading takes
            seconds of a core. Requests that come before it load what they need. None: all is
            loaded.
        overlaps: whether the device computes a step without the thread that started it.
    """

    config: EngineConfig
    runner: Runner
    encode: Callable[[Request], Sequence[int]]
    compile: Callable[[SamplingOptions], Callable[[], Constraint] | None]
    parser: Callable[[Request, Sequence[int]], Callable[[], AnswerParser]]
    constrain: Callable[[Request, Sequence[int]], SamplingOptions]
    decode: Callable[[Sequence[int]], str]
    new_text_stream: Callable[[tuple[int, ...]], TextStream]
    summary: str
    fingerprint: str
    prepare_compiler: Callable[[], None] | None = None
    vocabulary: tuple[bytes | None, ...] = ()
    load_rest: Callable[[], None] | None = None
    overlaps: bool = False
