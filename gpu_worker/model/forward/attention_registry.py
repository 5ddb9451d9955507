"""transformers' registry of attention functions, one name for each loaded model.

transformers looks an attention function up by name in a registry of the process. Each loaded model
gets a name of its own, so that several models in one process stay apart. The name is given back
when the model goes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = [
    "AttentionFunction",
    "implementation_of",
    "register",
    "registered",
    "unregister",
]


class AttentionFunction(Protocol):
    """What transformers calls in every attention layer.

    Args:
        module: the layer's attention module.
        query: ``[1, Hq, T, Dk]``.
        key: ``[1, Hkv, T, Dk]``.
        value: ``[1, Hkv, T, Dv]``.
        attention_mask: always None: for a name without a mask builder none is built.
        kwargs: ``scaling``, ``sliding_window``, ``softcap``, ``s_aux`` (sinks) and whatever else a
            family passes.

    Returns:
        ``[1, T, Hq, Dv]`` and no attention weights.
    """

    def __call__(  # noqa: D102 - documented above
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]: ...


def register(function: AttentionFunction) -> str:
    """Register ``function`` under a fresh name; returns the name."""
    name = f"penstock_{uuid.uuid4().hex}"
    _functions()[name] = function
    return name


def unregister(name: str) -> None:
    """Give a name from :func:`register` back; does nothing if that has happened."""
    _functions().pop(name, None)


@contextmanager
def registered(function: AttentionFunction) -> Iterator[str]:
    """The name of ``function`` for as long as the ``with`` lasts."""
    name = register(function)
    try:
        yield name
    finally:
        unregister(name)


def implementation_of(model: Any) -> str:
    """The name under which the model's decoder looks its attention function up."""
    # The only place where transformers keeps it; there is a public setter, but no public getter.
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _functions() -> Any:
    # Imported here: a model from a record needs nothing of transformers, which takes seconds.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS
