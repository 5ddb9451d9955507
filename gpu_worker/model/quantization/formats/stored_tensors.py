"""The tensors of a checkpoint's safetensors files, read by name."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.shared.errors import ModelError, ModelNotFound

from ...loading.checkpoint_folder import safetensors_files

__all__ = ["FULL", "StoredTensors"]

FULL = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of numbers that are converted to the model's dtype."""

_DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8",
    torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class StoredTensors:
    """Tensors by name, mapped from files: reading one touches no other.

    Args:
        folder: with ``*.safetensors``, and with their index if there are several.

    Raises:
        ModelNotFound: there are none, or one that the index names is missing.
        ModelError: a file is damaged, or two hold the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        paths = safetensors_files(folder)
        if not paths:
            raise ModelNotFound(f"no *.safetensors in {folder}; copy the checkpoint again")
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelNotFound(
                f"{folder} lacks {len(missing)} of its {len(paths)} weights files "
                f"({', '.join(missing[:3])}); copy them"
            )
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged ({error}); copy it again") from error
            for name in file.keys():  # noqa: SIM118
                if name in self._paths:
                    raise ModelError(
                        f"tensor {name!r} is both in {self._paths[name]} and in {path}; remove "
                        "the file that does not belong to the checkpoint"
                    )
                self._files[name], self._paths[name] = file, path

    @property
    def names(self) -> KeysView[str]:
        """Of all tensors."""
        return self._paths.keys()

    def files(self) -> list[tuple[Path, list[str]]]:
        """Every file, and the names of the tensors in it."""
        held: dict[Path, list[str]] = {}
        for name, path in self._paths.items():
            held.setdefault(path, []).append(name)
        return list(held.items())

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor called ``name``."""
        self._require(name)
        return tuple(self._files[name].get_slice(name).get_shape())

    def stored(self, name: str) -> str:
        """The type of its numbers, as safetensors names it: ``F16``, ``I32``, ..."""
        self._require(name)
        return str(self._files[name].get_slice(name).get_dtype())

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
    ) -> Tensor:
        """The tensor called ``name``.

        Args:
            name: of the tensor.
            shape: that it must have; None: any.
            dtypes: of which it must have one; None: any.

        Raises:
            ModelError: it is missing, or of another shape or dtype; names the file and the tensor.
        """
        self._require(name)
        tensor: Tensor
        try:
            tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise self.fault(name, str(error)) from error
        if shape is not None and tuple(tensor.shape) != shape:
            raise self.fault(name, f"its shape is {list(tensor.shape)}, expected: {list(shape)}")
        if dtypes is not None and tensor.dtype not in dtypes:
            wanted = " or ".join(_DTYPES.get(dtype, str(dtype)) for dtype in dtypes)
            raise self.fault(
                name, f"it holds {_DTYPES.get(tensor.dtype, tensor.dtype)}, expected: {wanted}"
            )
        return tensor

    def fault(self, name: str, why: str) -> ModelError:
        """The error for a tensor that cannot be used."""
        where = self._paths.get(name, self.folder)
        return ModelError(f"{where}: tensor {name!r} is unusable: {why}; copy the checkpoint again")

    def _require(self, name: str) -> None:
        if name not in self._paths:
            raise ModelError(
                f"the checkpoint in {self.folder} lacks tensor {name!r}; copy it again, all its "
                "files"
            )
