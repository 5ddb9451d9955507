"""What the batchers over one encoder share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.shared.errors import InvalidRequest, PenstockError
from penstock.shared.protocol.states import ModelKind

from .encoder import Encoder, Row, load_encoder
from .encoder_items import Work, run_items

__all__ = ["EncoderBatcher", "check_fields"]


class EncoderBatcher:
    """Loads a checkpoint and answers items, each of which is a map.

    Args:
        path, dtype, device, max_tokens: see :func:`.encoder.load_encoder`.
    """

    kind: ModelKind

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_tokens: int | None = None,
    ) -> None:
        self._path = path
        self._options: dict[str, Any] = {
            "dtype": dtype, "device": device, "max_tokens": max_tokens,
        }  # fmt: skip

    def load(self) -> None:
        """Load the checkpoint.

        Raises:
            ConfigurationError, ModelError: see :func:`.encoder.load_encoder`.
        """
        self.encoder: Encoder = load_encoder(self._path, kind=self.kind, **self._options)

    def infer(self, items: Sequence[object]) -> list[dict[str, Any] | PenstockError]:
        """Answer items; see the class."""
        return run_items(self.encoder, items, self._read, self._compute, self._answer)

    def _read(self, item: Mapping[str, Any]) -> Work:
        raise NotImplementedError

    def _compute(self, rows: Sequence[Row], works: Sequence[Work]) -> Tensor:
        raise NotImplementedError

    def _answer(self, work: Work, values: Tensor, num_tokens: int) -> dict[str, Any]:
        raise NotImplementedError


def check_fields(item: Mapping[str, Any], *known: str) -> None:
    """Refuse what an item must not hold.

    Raises:
        InvalidRequest: a field is not known.
    """
    for name in item:
        if name not in known:
            raise InvalidRequest(name, item[name], f"fields {', '.join(known)}")
