"""The step that a model's attention function is computing.

transformers hands an attention function a layer's tensors and nothing of ours: some families drop
keyword arguments they do not know. So the step lies beside the forward, in an object that the
attention function and the forward's caller share. One thread at a time runs a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.kernels.ragged import RaggedBatch
from penstock.kernels.workspace import AttentionWorkspace

from ..kv.kv_pool import KVPool

__all__ = ["ForwardContext", "ForwardStep"]


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """A forward in progress.

    Attributes:
        pool: where its keys and values lie.
        batches: its tokens; one batch for each KV cache group of the pool, with its block tables.
        workspace: what its attention layers share.
    """

    pool: KVPool
    batches: tuple[RaggedBatch, ...]
    workspace: AttentionWorkspace = field(default_factory=AttentionWorkspace)


class ForwardContext:
    """Holds the forward in progress.

    It is empty between forwards, so that neither a registered attention function nor a model keeps
    a pool alive after its owner has dropped it.
    """

    __slots__ = ("_step",)

    def __init__(self) -> None:
        self._step: ForwardStep | None = None

    @contextmanager
    def step(self, pool: KVPool, batches: tuple[RaggedBatch, ...]) -> Iterator[None]:
        """Make ``pool`` and ``batches`` current for the forward inside the ``with``."""
        self._step = ForwardStep(pool, batches)
        try:
            yield
        finally:
            self._step = None

    def current(self) -> ForwardStep:
        """The forward in progress.

        Raises:
            RuntimeError: there is none. The model was called as a plain transformers model, but its
                attention reads and writes the paged pool and cannot work alone.
        """
        if self._step is None:
            raise RuntimeError(
                "this model computes attention over a paged KV pool; run it through ModelRunner"
            )
        return self._step
