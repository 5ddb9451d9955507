"""What applications use: submit requests to penstock and stream their tokens.

Importing this package brings redis-py and msgpack, and neither torch nor transformers.
"""

from __future__ import annotations

from penstock.shared.errors import (
    ConfigurationError,
    IdConflict,
    IdInUse,
    InvalidRequest,
    PenstockError,
    QueueFull,
    RedisUnavailable,
    RequestFailed,
    StreamDiverged,
    StreamError,
    SubmitRefused,
    UnknownDeadLetter,
    UnknownRequest,
)
from penstock.shared.protocol.chat.deltas import Delta
from penstock.shared.protocol.events import Chunk, End, TokenLogprobs, Usage
from penstock.shared.protocol.states import Lane, Reason, State
from penstock.shared.scripts.operations import CancelReply, DeadLetter

from .administration.dead_letters import DeadLetters
from .client import Producer
from .encoder_answers import Classes, Embeddings, Ranking
from .results import Result, Status, Submitted
from .stream import TokenStream
from .sync import BlockingProducer, BlockingStream

__all__ = [
    "BlockingProducer",
    "BlockingStream",
    "CancelReply",
    "Chunk",
    "Classes",
    "ConfigurationError",
    "DeadLetter",
    "DeadLetters",
    "Delta",
    "Embeddings",
    "End",
    "IdConflict",
    "IdInUse",
    "InvalidRequest",
    "Lane",
    "PenstockError",
    "Producer",
    "QueueFull",
    "Ranking",
    "Reason",
    "RedisUnavailable",
    "RequestFailed",
    "Result",
    "State",
    "Status",
    "StreamDiverged",
    "StreamError",
    "SubmitRefused",
    "Submitted",
    "TokenLogprobs",
    "TokenStream",
    "UnknownDeadLetter",
    "UnknownRequest",
    "Usage",
]
