"""The settings of the section ``model``."""

from __future__ import annotations

from typing import Literal

from .section import Section, setting

__all__ = ["ModelSettings"]


class ModelSettings(Section):
    """Which checkpoint a worker loads, and how."""

    path: str = setting(
        "demo",
        "Directory of a Hugging Face checkpoint with safetensors weights; `demo` is the small "
        "model that comes with penstock. Nothing is downloaded. `synthetic` is no model: a worker "
        "that gives tokens by a hash, for load tests and fault storms.",
        min_length=1,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of the model; `auto` takes a GPU if PyTorch sees one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Number format of weights and KV cache. `auto` takes the checkpoint's own on a GPU, and "
        "float32 on a CPU.",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8", "prefer-8bit"] = setting(
        "auto",
        "Number format of the KV cache: `auto` is that of `dtype`. `int8` and `fp8` keep 8 bits "
        "and a scale for each token and head, for up to twice the sequences of bfloat16 and four "
        "times those of float32 in the same memory. `int8` is for CPUs. `fp8` (e4m3) is for any "
        "GPU; on a CPU PyTorch computes it, slower than the native library does `int8`. "
        "`prefer-8bit` is `int8` on a CPU and `fp8` on a GPU.",
    )
    quantization: Literal["none", "auto", "int8", "int4", "nf4", "fp8", "prefer-int8"] = setting(
        "auto",
        "Number format of the weights of linear layers. `auto` takes the checkpoint as it is. "
        "`int8`, `int4`, `nf4` and `fp8` round full weights when they are loaded; activations stay "
        "in `dtype`. `none` refuses a quantised checkpoint, as the others do; `prefer-int8` is "
        "`int8` for a full one, and takes a quantised one as it is.",
    )
    quantization_group: int = setting(
        64,
        "In `int4` and `nf4`, how many inputs of a layer share a scale. Smaller groups are more "
        "exact and take more memory; 0 makes one group of all. A multiple of 4: the native library "
        "computes with no other.",
        unit="inputs",
        ge=0,
        le=65_536,
        multiple_of=4,
    )
    quantization_zeros: Literal["on", "off"] = setting(
        "off",
        "In `int4`, whether codes span a group's smallest to largest weight, instead of lying "
        "around zero: more exact, and slower by a few percent.",
    )
    quantization_scales: Literal["channel", "tensor"] = setting(
        "channel",
        "In `int8`, whether each output of a layer has a scale, or each layer one.",
    )
    quantization_head: Literal["int8", "same", "full"] = setting(
        "int8",
        "Number format of the output layer beside quantised ones: 8 bits with a scale for each "
        "token, the same as theirs, or as it is.",
    )
    quantization_keep: str = setting(
        "",
        "Modules that stay in full, by commas: names or their last parts, with `*` and `?`. "
        "Embeddings and norms always do.",
        max_length=1000,
    )
    max_model_len: int | None = setting(
        None,
        "Longest sequence, prompt and output together. `auto` takes it from the checkpoint's "
        "configuration; more than that is refused.",
        unit="tokens",
        none="auto",
        ge=1,
        le=16_777_216,
    )
    native: Literal["auto", "on", "off"] = setting(
        "auto",
        "On a CPU, compute steps by the native library, which is several times faster than PyTorch "
        "and is compiled at first use. `auto` does so for models that it can compute, if there is "
        "a C++ compiler; `on` refuses all others; `off` leaves everything to PyTorch.",
    )
    start_record: Literal["on", "off"] = setting(
        "on",
        "Whether the first start of a natively computed checkpoint records its findings in "
        "`~/.cache/penstock/models`. Later starts then need no trials and no model of "
        "transformers. A record counts while the checkpoint's files (weights by size and time of "
        "change), the settings above and all packages are the same.",
    )
    packed_weights: Literal["memory", "disk"] = setting(
        "memory",
        "Where the native library's copy of the weights lies. `disk` keeps it beside the start-up "
        "record, as large as the weights are when packed, and later starts map that file. So they "
        "neither read nor round the checkpoint's weights, and workers of a machine share the "
        "memory. `memory` packs at each start, on huge pages, which are a little faster to read.",
    )
    synthetic_step_ms: float = setting(
        2.0,
        "How long a step of `synthetic` takes at least.",
        unit="ms",
        ge=0,
        le=60_000,
    )
