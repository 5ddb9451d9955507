"""Writes layers as compressed-tensors has them; :mod:`.compressed_tensors` says what lies where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..form import QuantizedWeight

__all__ = ["compressed_config", "compressed_tensors_of"]


def compressed_config(form: QuantizedWeight, ignore: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose layers are all coded like ``form``.

    Args:
        form: of one of them.
        ignore: linear layers that are not quantised.
    """
    is_float = form.codebook is not None
    layout = "float-quantized" if is_float else "pack-quantized"
    weights = {
        "num_bits": form.bits,
        "type": "float" if is_float else "int",
        "symmetric": form.zeros is None,
        "strategy": "group" if form.group_size else "channel",
        "group_size": form.group_size or None,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": None,
        "output_activations": None, "format": layout,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def compressed_tensors_of(form: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one layer by the ends of their names.

    Args:
        form: int4, int8 or e4m3, whole zero points, no permutation.
        dtype: of the scales, which must be exact in it.
    """
    scales = form.scales.to(dtype)
    if form.codebook is not None:
        return {"weight": form.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    middle = 1 << (form.bits - 1)
    codes = form.codes.int() + (0 if form.zeros is not None else middle)
    parts = {
        "weight_packed": _pack(codes, form.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([form.outputs, form.inputs]),
    }
    if form.zeros is not None:
        parts["weight_zero_point"] = _pack(form.zeros.T.int(), form.bits).T.contiguous()
    return parts


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``[rows, n]`` to int32 words, zeros filling the last."""
    data = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits))).to(torch.uint8)
    if bits == 4:
        data = data[:, ::2] | data[:, 1::2] << 4
    return data.contiguous().view(torch.int32)
