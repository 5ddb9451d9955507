#!/usr/bin/env python
"""Compiles every Triton kernel for GPUs that are not here, to catch what no interpreter shows.

    python scripts/aot_compile.py [--target sm_80 --target sm_90] [--match TEXT ...] [--json]

Needs Triton and no GPU. Each variant is a geometry and option set that real models ask for. Exit
code 1 if one does not compile or asks for more shared memory than a block of that GPU has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The interpreter replaces the compiler when this is set as Triton is imported.
os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError

from penstock.kernels.gpu import (
    kv_write_triton,
    paged_attention_triton,
    quantized_linear_triton,
)

# Shared memory one block may use (CUDA C++ Programming Guide, compute capabilities).
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024}

ELEMENT_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Variant:
    """One kernel with its argument types and compile-time arguments."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]


def attention(
    name: str,
    dtype: str,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    decode: bool = False,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    fp8: bool = False,
    block_size: int = 16,
) -> Variant:
    constants = paged_attention_triton.constants(
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        element_size=ELEMENT_SIZE[dtype],
        decode=decode,
        window=window,
        softcap=softcap,
        sinks=sinks,
        fp8=fp8,
    )
    # The query's last stride is 1 in practice, and Triton then compiles it in.
    constants["query_stride_d"] = 1
    types = dict.fromkeys(("out", "query", "sinks"), f"*{dtype}")
    types |= dict.fromkeys(("key_cache", "value_cache"), "*u8" if fp8 else f"*{dtype}")
    types |= dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i32")
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    kernel = paged_attention_triton.paged_attention_kernel
    phase = "decode" if decode else "ragged"
    return Variant(
        f"paged_attention/{name}/{dtype}/{phase}", kernel, _signature(kernel, types, constants),
        constants,
    )  # fmt: skip


def kv_write(name: str, dtype: str, kv_heads: int, key_dim: int, value_dim: int) -> Variant:
    constants: dict[str, Any] = kv_write_triton.constants(kv_heads, key_dim, value_dim)
    constants |= {"key_stride_d": 1, "value_stride_d": 1}
    types = dict.fromkeys(("key", "value", "key_cache", "value_cache"), f"*{dtype}")
    types["slots"] = "*i64"
    kernel = kv_write_triton.kv_write_kernel
    return Variant(
        f"kv_write/{name}/{dtype}", kernel, _signature(kernel, types, constants), constants
    )


def kv_write_fp8(name: str, dtype: str, kv_heads: int, key_dim: int, value_dim: int) -> Variant:
    constants: dict[str, Any] = kv_write_triton.fp8_constants(kv_heads, key_dim, value_dim, 16)
    constants |= {"key_stride_d": 1, "value_stride_d": 1}
    types = dict.fromkeys(("key", "value"), f"*{dtype}")
    types |= dict.fromkeys(("key_cache", "value_cache"), "*u8") | {"slots": "*i64"}
    kernel = kv_write_triton.kv_write_fp8_kernel
    return Variant(
        f"kv_write_fp8/{name}/{dtype}", kernel, _signature(kernel, types, constants), constants
    )


def linear(
    name: str, dtype: str, rows: int, inputs: int, group: int, bits: int, *, offsets: bool = False
) -> Variant:
    constants: dict[str, Any] = quantized_linear_triton.constants(
        rows, group, inputs, bits=bits, offsets=offsets
    )
    types = dict.fromkeys(("out", "x"), f"*{dtype}")
    types |= dict.fromkeys(("scales", "offsets", "values"), "*fp32") | {"codes": "*u8"}
    kernel = quantized_linear_triton.quantized_linear_kernel
    return Variant(
        f"quantized_linear/{name}/{dtype}", kernel, _signature(kernel, types, constants), constants
    )


def _signature(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    return {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }


def variants() -> Iterator[Variant]:
    for dtype in ELEMENT_SIZE:
        for decode in (False, True):
            yield attention("llama-8b", dtype, 32, 8, 128, 128, decode=decode)
            yield attention("smollm-135m", dtype, 9, 3, 64, 64, decode=decode)
    for decode in (False, True):
        yield attention("mistral", "bf16", 32, 8, 128, 128, window=True, decode=decode)
        yield attention("gemma2", "bf16", 8, 4, 256, 256, window=True, softcap=True, decode=decode)
        yield attention("gpt-oss", "bf16", 64, 8, 64, 64, window=True, sinks=True, decode=decode)
        yield attention("deepseek-mla", "bf16", 16, 16, 192, 128, decode=decode)
        yield attention("phi-odd-dim", "fp16", 32, 32, 80, 80, decode=decode)
        yield attention("falcon-mqa", "fp16", 71, 1, 64, 64, decode=decode)
    yield attention("gemma2", "fp32", 8, 4, 256, 256, window=True, softcap=True)
    yield attention("odd-block", "fp16", 32, 8, 128, 128, block_size=13)
    for decode in (False, True):
        for dtype in ELEMENT_SIZE:
            yield attention("kv-fp8", dtype, 32, 8, 128, 128, fp8=True, decode=decode)
        yield attention("kv-fp8-mla", "bf16", 16, 16, 192, 128, fp8=True, decode=decode)
    yield attention(
        "kv-fp8-all", "fp16", 8, 4, 256, 256, fp8=True, window=True, softcap=True, sinks=True
    )
    yield attention("kv-fp8-odd-block", "bf16", 32, 8, 80, 80, fp8=True, block_size=13)
    for dtype in ELEMENT_SIZE:
        yield kv_write("llama-8b", dtype, 8, 128, 128)
        yield kv_write_fp8("llama-8b", dtype, 8, 128, 128)
    yield kv_write_fp8("deepseek-mla", "bf16", 128, 192, 128)
    yield kv_write_fp8("odd-dim", "fp16", 3, 80, 80)
    for dtype in ELEMENT_SIZE:
        yield linear("int4-decode", dtype, 1, 4096, 128, 4)
        yield linear("int8-prefill", dtype, 2048, 4096, 4096, 8)
    yield linear("int4-zeros", "bf16", 16, 4096, 32, 4, offsets=True)
    yield kv_write("deepseek-mla", "bf16", 16, 192, 128)
    yield kv_write("smollm-135m", "fp32", 3, 64, 64)


def compile_variant(variant: Variant, target: str) -> dict[str, Any]:
    """One row of the report: seconds, shared bytes, spills, and ``error`` if it failed."""
    began = time.perf_counter()
    row: dict[str, Any] = {"kernel": variant.name, "target": target, "error": None}
    try:
        compiled = triton.compile(
            ASTSource(variant.kernel, signature=variant.signature, constexprs=variant.constants),
            target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
            options={"num_warps": 4, "enable_fp_fusion": True},
        )
    except (CompilationError, RuntimeError) as error:
        # The first lines quote the source around the place, the last says what is wrong.
        row["error"] = str(error).strip().splitlines()[-1] if str(error) else type(error).__name__
        return row
    row["seconds"] = round(time.perf_counter() - began, 2)
    row["shared_bytes"] = compiled.metadata.shared
    row["cubin_bytes"] = len(compiled.asm["cubin"])
    if compiled.metadata.shared > SHARED_BYTES[target]:
        row["error"] = f"needs {compiled.metadata.shared} bytes of shared memory"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", action="append", choices=sorted(SHARED_BYTES), help="default: sm_80 and sm_90"
    )
    parser.add_argument(
        "--match", action="append", help="only variants whose name contains this; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    chosen = list(variants())
    if arguments.match:
        for text in arguments.match:
            if not any(text in variant.name for variant in chosen):
                parser.error(f"--match {text!r} fits no variant")
        chosen = [v for v in chosen if any(text in v.name for text in arguments.match)]
    failed = False
    for target in arguments.target or ["sm_80", "sm_90"]:
        for variant in chosen:
            row = compile_variant(variant, target)
            failed |= row["error"] is not None
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                state = (
                    row["error"] or f"{row['shared_bytes']:>7} B shared  {row['seconds']:5.2f} s"
                )
                print(f"{target}  {variant.name:<42} {state}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
