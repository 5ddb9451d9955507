"""The weights in a file of ``torch.save``: a state dict, read without executing its pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from penstock.shared.errors import ModelError

from .named_weights import NamedWeight

__all__ = ["torch_weights"]


def torch_weights(path: Path) -> dict[str, NamedWeight]:
    """The tensors of a state dict, which may be one entry of a dict with other things.

    Raises:
        ModelError: the file is damaged, or holds other objects than tensors and plain containers.
    """
    try:
        tree: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=is_zipfile(path) or None
        )
    except Exception as error:  # of the unpickler, the archive, or tensors that are too large
        reason = str(error).split("\n", 1)[0].split(". ", 1)[0]
        raise ModelError(
            f"{path} cannot be read as tensors alone ({reason}), and no pickle is executed; save "
            "the model's state_dict() with safetensors"
        ) from error
    found = [_tensors(tree)]
    if isinstance(tree, Mapping) and not found[0]:
        found = [tensors for value in tree.values() if (tensors := _tensors(value))]
    if len(found) != 1 or not found[0]:
        raise ModelError(
            f"{path} holds no state dict, or several; save the model's state_dict() "
            "with safetensors"
        )
    return {
        name: NamedWeight(tuple(tensor.shape), lambda tensor=tensor: tensor, None, name)  # type: ignore[misc]
        for name, tensor in found[0].items()
    }


def _tensors(tree: object) -> dict[str, Tensor]:
    if not isinstance(tree, Mapping):
        return {}
    return {str(name): value for name, value in tree.items() if isinstance(value, Tensor)}
