"""Which format a checkpoint is in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.shared.errors import ModelError, UnsupportedModel

from .awq import AWQ
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .gptq import GPTQ
from .mxfp4 import MXFP4
from .weight_format import CONVERT, WeightFormat

__all__ = ["format_of"]

_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat | MXFP4]] = {
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
    "mxfp4": MXFP4,
}


def format_of(config: Mapping[str, Any]) -> WeightFormat | MXFP4:
    """The format of a checkpoint with the ``quantization_config`` given.

    Raises:
        UnsupportedModel: it is none that is served, or has a size that is not.
        ModelError: it cannot be read.
    """
    method = str(config.get("quant_method") or "")
    if not method and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # as older ones have it
    try:
        kind = _FORMATS[method]
    except KeyError:
        raise UnsupportedModel(
            f"this checkpoint is quantised by {method!r}; served: {', '.join(_FORMATS)}, GGUF; "
            f"{CONVERT}"
        ) from None
    try:
        return kind(config)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"quantization_config in config.json is no {method} one ({error!r}); "
            "copy the checkpoint again"
        ) from error
