"""What travels over Redis: requests in, chunks and ends out, and their closed sets of values."""

from .chat.chat_options import ChatOptions
from .chat.deltas import Delta
from .choice_parts import Part
from .event_reader import unpack_event
from .events import Chunk, End, Run, TokenLogprobs, Usage, rolling_digest
from .request import MAX_PAYLOAD_BYTES, PROTOCOL_VERSION, Request, check_id, check_tenant
from .sampling_options import SamplingOptions
from .states import Answer, Lane, ModelKind, OnDisconnect, Reason, Speculation, State

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "PROTOCOL_VERSION",
    "Answer",
    "ChatOptions",
    "Chunk",
    "Delta",
    "End",
    "Lane",
    "ModelKind",
    "OnDisconnect",
    "Part",
    "Reason",
    "Request",
    "Run",
    "SamplingOptions",
    "Speculation",
    "State",
    "TokenLogprobs",
    "Usage",
    "check_id",
    "check_tenant",
    "rolling_digest",
    "unpack_event",
]
