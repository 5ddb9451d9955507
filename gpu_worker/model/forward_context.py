"""What the attention function of a model must know about the step that is being computed.

transformers hands an attention function the layer's tensors and nothing of ours: some families
drop keyword arguments they do not know. So the step is put beside the forward, in an object that
the function and its caller share. One model is run by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.kernels.ragged import RaggedBatch

    from .kv.kv_pool import KVPool

__all__ = ["ForwardContext"]


class ForwardContext:
    """Holds the KV pool and the batches of the forward in progress; empty between forwards.

    There is a batch for each KV kind of the pool: the same tokens, with that kind's block tables.

    Empty between forwards, so that neither a registered attention function nor a model keeps a
    pool alive that its owner has dropped.
    """

    __slots__ = ("_step",)

    def __init__(self) -> None:
        self._step: tuple[KVPool, tuple[RaggedBatch, ...]] | None = None

    @contextmanager
    def step(self, pool: KVPool, batches: tuple[RaggedBatch, ...]) -> Iterator[None]:
        """Make ``pool`` and ``batches`` current for the forward run inside the ``with``."""
        self._step = (pool, batches)
        try:
            yield
        finally:
            self._step = None

    def current(self) -> tuple[KVPool, tuple[RaggedBatch, ...]]:
        """The pool and batches of the forward in progress.

        Raises:
            RuntimeError: the model was called without them, as one calls a plain transformers
                model; its attention reads and writes the paged pool and cannot work alone.
        """
        if self._step is None:
            raise RuntimeError(
                "this model computes attention over a paged KV pool; run it through ModelRunner"
            )
        return self._step
