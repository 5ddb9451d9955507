"""Writes tiny quantised checkpoints after the formats' specifications.

Each writer takes a linear layer's weight and gives the tensors that stand for it, and the weight
that they stand for, computed from the specification's formula and not by the product's code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "Written", "awq", "bnb_four", "bnb_int8", "compressed", "gptq", "mxfp4", "pack", "rewrite",
    "rewrite_experts",
]  # fmt: skip

Written = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors by the ends of their names, and the weight they stand for."""


def rewrite(
    source: Path,
    target: Path,
    write: Callable[[Tensor], Written],
    config: dict[str, Any],
    dense_target: Path | None = None,
) -> None:
    """Quantise all linear layers but the head of a checkpoint.

    Args:
        source: an unquantised checkpoint, with one file.
        target: where the quantised one goes.
        write: quantises a weight.
        config: ``quantization_config`` of the quantised one.
        dense_target: where a plain checkpoint with the weights that it stands for goes, in float32.
    """
    tensors = load_file(source / "model.safetensors")
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or tensor.dim() != 2:
            coded[name] = dense[name] = tensor
            continue
        parts, dense[name] = write(tensor.float())
        coded |= {f"{module}.{end}": part.contiguous() for end, part in parts.items()}
    for folder, found in ((target, coded), (dense_target, dense)):
        if folder is None:
            continue
        shutil.copytree(source, folder)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((target / "config.json").read_text())
    tree["quantization_config"] = config
    (target / "config.json").write_text(json.dumps(tree))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``[..., n]`` to int32 ``[..., n * bits / 32]``, the first in the lowest."""
    count = 32 // bits
    grouped = codes.long().reshape(*codes.shape[:-1], -1, count)
    words = (grouped << (bits * torch.arange(count))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _rounded(weight: Tensor, bits: int, groups: Tensor, symmetric: bool) -> tuple[Tensor, ...]:
    """Codes ``[outputs, inputs]``, scales and zeros ``[outputs, groups]`` by each input's group."""
    count = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count)
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (2 ** (bits - 1) - 1)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[:, group] = (high - low) / (2**bits - 1)
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, 2**bits - 1)
    scales = scales.half().float()
    codes = (weight / scales[:, groups]).round() + zeros[:, groups]
    return codes.clamp(0, 2**bits - 1), scales, zeros


def gptq(bits: int, size: int, *, symmetric: bool, act_order: bool, version: int) -> Any:
    """After AutoGPTQ's and GPTQModel's layout."""
    ones = int(f"{1:0{bits}b}" * (32 // bits), 2)

    def write(weight: Tensor) -> Written:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // size
        if act_order:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros = _rounded(weight, bits, groups, symmetric)
        parts = {
            "qweight": pack(codes, bits).T,
            # Off whole words, as GPTQModel's convert_gptq_v2_to_v1_format does it.
            "qzeros": pack(zeros.T, bits) - (ones if version == 1 else 0),
            "scales": scales.T.half(),
            "g_idx": groups.int(),
        }
        return parts, (codes - zeros[:, groups]) * scales[:, groups]

    return write


def awq(size: int) -> Any:
    """After AutoAWQ's WQLinear_GEMM."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: Tensor) -> Tensor:
        return pack(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(codes.shape), 4)

    def write(weight: Tensor) -> Written:
        groups = torch.arange(weight.shape[1]) // size
        codes, scales, zeros = _rounded(weight, 4, groups, symmetric=False)
        parts = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T.half()}
        return parts, (codes - zeros[:, groups]) * scales[:, groups]

    return write


def bnb_int8(weight: Tensor) -> Written:
    """After bitsandbytes' Int8Params."""
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest.unsqueeze(1))).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * largest.unsqueeze(1) / 127


def bnb_four(*, double: bool, kind: str = "nf4") -> Any:
    """Codes by bitsandbytes itself. Where blocks run over the ends of rows, its dequantisation on
    a CPU (0.50) is off by more than a step, so what they stand for is by the formula."""
    from bitsandbytes import functional

    def write(weight: Tensor) -> Written:
        packed, state = functional.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=double
        )
        parts = {f"weight.{end}": value for end, value in state.as_dict(packed=True).items()}
        scales = state.absmax
        if double:
            nested = state.state2
            scales = nested.code[scales.int()] * nested.absmax.repeat_interleave(256)[: len(scales)]
            scales = scales + state.offset
        data = packed.reshape(-1)
        values = state.code[torch.stack((data >> 4, data & 15), dim=-1).reshape(-1).int()]
        dense = (values * scales.repeat_interleave(64)[: len(values)]).view(weight.shape)
        parts["weight"] = packed
        return {end: part.clone() for end, part in parts.items()}, dense

    return write


def compressed(layout: str, **weights: Any) -> tuple[Any, dict[str, Any]]:
    """A writer and ``quantization_config``, both by compressed-tensors itself.

    Args:
        layout: such as ``pack-quantized``.
        weights: of QuantizationArgs.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    compressor: Any = BaseCompressor.get_value_from_registry(layout)

    def write(weight: Tensor) -> Written:
        outputs = len(weight)
        rows, size = weight, weights.get("group_size")
        if size:
            rows = weight.reshape(outputs, -1, size)
        if args.strategy == "tensor":
            rows = weight.reshape(1, -1)
        if args.strategy == "block":
            high, wide = args.block_structure
            blocks = weight.reshape(outputs // high, high, -1, wide).permute(0, 2, 1, 3)
            rows = blocks.reshape(*blocks.shape[:2], -1)
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
        if args.strategy == "channel":
            scale, zero = scale.unsqueeze(1), zero.unsqueeze(1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        parts = compressor.compress(state, scheme)
        dense = compressor.decompress(dict(parts), scheme)["weight"].float()
        return parts, dense

    group = json.loads(scheme.model_dump_json())
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return write, config


def mxfp4(weight: Tensor) -> Written:
    """A stack ``[experts, inputs, outputs]`` after OCP Microscaling Formats, blocks of 32."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    blocks = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    scaled = blocks / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - values).abs().argmin(-1)
    dense = (values[codes] * torch.exp2(exponents).unsqueeze(-1)).flatten(2).transpose(1, 2)
    data = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"blocks": data, "scales": (exponents + 127).to(torch.uint8)}, dense


def rewrite_experts(source: Path, target: Path, dense_target: Path) -> None:
    """Quantise the experts of a gpt-oss checkpoint."""
    tensors = load_file(source / "model.safetensors")
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            coded[name] = dense[name] = tensor
            continue
        parts, full = mxfp4(tensor.float())
        coded |= {f"{name}_{end}": part.contiguous() for end, part in parts.items()}
        dense[name] = full.contiguous()
    for folder, found in ((target, coded), (dense_target, dense)):
        shutil.copytree(source, folder)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((target / "config.json").read_text())
    tree["quantization_config"] = {"quant_method": "mxfp4"}
    (target / "config.json").write_text(json.dumps(tree))
