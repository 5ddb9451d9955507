"""The time of a step: the roofline of a model on a device, or a constant.

A step reads all weights once and the keys and values of every context it attends to; it multiplies
every weight with every query token. Whichever of the two takes longer sets the time (Williams,
Waterman, Patterson, 2009, "Roofline"), plus an overhead that does not depend on the work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.gpu_worker.engine.scheduling.step_features import StepFeatures
from penstock.shared.errors import ConfigurationError

__all__ = [
    "HARDWARE",
    "MODELS",
    "ConstantCost",
    "CostModel",
    "Hardware",
    "ModelShape",
    "Roofline",
    "calibrated",
    "read_metrics",
]


_CONSTANT_COST_TOKENS = 1 << 20
"""KV pool of a device of which only the step time is known."""


class CostModel(Protocol):
    """Step times and sizes of a device."""

    @property
    def context(self) -> int:
        """Longest context, in tokens."""
        ...

    def seconds(self, work: StepFeatures) -> float:
        """Seconds of a step, without its swaps."""
        ...

    def swap_seconds(self, tokens: int) -> float:
        """Seconds to copy the keys and values of ``tokens`` to the host or back."""
        ...

    def kv_blocks(self, block_size: int) -> int:
        """Number of KV blocks of ``block_size`` tokens that fit into memory."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """The same time for every step, as with ``--model synthetic``."""

    step_s: float

    def seconds(self, work: StepFeatures) -> float:
        """The constant."""
        del work
        return self.step_s

    def swap_seconds(self, tokens: int) -> float:
        """Zero: only the step time of such a device is known."""
        del tokens
        return 0.0

    @property
    def context(self) -> int:
        """More than any request needs."""
        return _CONSTANT_COST_TOKENS

    def kv_blocks(self, block_size: int) -> int:
        """Room for one sequence of that length."""
        return max(1, _CONSTANT_COST_TOKENS // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device.

    Attributes:
        bandwidth: bytes per second of its memory, as its data sheet says.
        flops: dense operations per second in the model's dtype, as its data sheet says.
        bandwidth_share, flops_share: shares that real kernels reach; assumptions.
        memory: bytes for weights and KV.
        overhead_s: of a step: scheduling, launches, sampling.
        sequence_s: further overhead per sequence in the batch.
        link: bytes per second between device and host.
    """

    bandwidth: float
    flops: float
    bandwidth_share: float
    flops_share: float
    memory: float
    overhead_s: float
    sequence_s: float
    link: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder that set the cost of a step.

    Attributes:
        parameters: weights multiplied with every token.
        layers, query_heads, kv_heads, head_dim: of its attention.
        weight_bytes, kv_bytes: bytes per weight and per element of the KV cache.
        context: longest context, in tokens.
    """

    parameters: float
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float
    kv_bytes: float
    context: int

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes


# Data sheets: NVIDIA H200 SXM (141 GB HBM3e, 4.8 TB/s, 989 TFLOP/s BF16 dense) and A100 SXM (80 GB,
# 2.039 TB/s, 312 TFLOP/s). `cpu` is one slow thread or two, as in a small virtual machine. The
# shares and overheads are assumptions until they are calibrated. Links are PCIe 5.0 and 4.0 with 16
# lanes, of which copies reach some 80 %; a CPU copies within its memory.
HARDWARE = {
    "a100": Hardware(
        bandwidth=2.039e12, flops=312e12, bandwidth_share=0.8, flops_share=0.6,
        memory=80e9, overhead_s=1.5e-3, sequence_s=5e-6, link=25e9,
    ),
    "cpu": Hardware(
        bandwidth=20e9, flops=100e9, bandwidth_share=0.6, flops_share=0.5,
        memory=4e9, overhead_s=2e-3, sequence_s=1e-4, link=6e9,
    ),
    "h200": Hardware(
        bandwidth=4.8e12, flops=989e12, bandwidth_share=0.8, flops_share=0.6,
        memory=141e9, overhead_s=1.5e-3, sequence_s=5e-6, link=50e9,
    ),
}  # fmt: skip

# `7b` is shaped like Llama-2-7B with grouped keys and values. `70b` is like Llama-3-70B in 8 bits,
# to fit one device; `demo` like the model that is shipped.
MODELS = {
    "70b": ModelShape(
        parameters=70.6e9, layers=80, query_heads=64, kv_heads=8, head_dim=128,
        weight_bytes=1, kv_bytes=2, context=131072,
    ),
    "7b": ModelShape(
        parameters=7.2e9, layers=32, query_heads=32, kv_heads=8, head_dim=128,
        weight_bytes=2, kv_bytes=2, context=32768,
    ),
    "demo": ModelShape(
        parameters=5.5e6, layers=12, query_heads=6, kv_heads=2,
        head_dim=32, weight_bytes=4, kv_bytes=4, context=2048,
    ),
}  # fmt: skip


class Roofline:
    """The time of a step of a model on a device.

    Args:
        hardware: the device.
        model: the model.
        scale: factor on the whole, from a measurement (see :func:`calibrated`).
    """

    def __init__(self, hardware: Hardware, model: ModelShape, scale: float = 1.0) -> None:
        self.hardware = hardware
        self.model = model
        self.scale = scale
        bandwidth = hardware.bandwidth * hardware.bandwidth_share / scale
        flops = hardware.flops * hardware.flops_share / scale
        self._weights_s = model.parameters * model.weight_bytes / bandwidth
        self._context_s = model.kv_bytes_per_token / bandwidth
        self._token_s = 2 * model.parameters / flops
        self._pair_s = 4 * model.layers * model.query_heads * model.head_dim / flops
        self._overhead_s = hardware.overhead_s * scale
        self._sequence_s = hardware.sequence_s * scale

    @property
    def context(self) -> int:
        """The model's."""
        return self.model.context

    def seconds(self, work: StepFeatures) -> float:
        """``max(bytes / bandwidth, operations / flops) + overhead``."""
        memory = self._weights_s + self._context_s * work.context
        compute = self._token_s * work.tokens + self._pair_s * work.pairs
        overhead = self._overhead_s + self._sequence_s * work.sequences
        return (memory if memory > compute else compute) + overhead

    def swap_seconds(self, tokens: int) -> float:
        """``bytes / link``: copies start at once, and the step waits for them."""
        return tokens * self.model.kv_bytes_per_token / self.hardware.link

    def kv_blocks(self, block_size: int) -> int:
        """KV blocks beside the weights; a tenth of the memory stays free for the rest.

        Raises:
            ConfigurationError: the weights alone do not fit.
        """
        room = 0.9 * self.hardware.memory - self.model.parameters * self.model.weight_bytes
        blocks = int(room / (self.model.kv_bytes_per_token * block_size))
        if blocks < 1:
            raise ConfigurationError(
                f"the model's weights take {self.model.parameters * self.model.weight_bytes:.3g} "
                f"bytes, and the device has {self.hardware.memory:.3g}: choose a larger device"
            )
        return blocks


def calibrated(model: Roofline, metrics: str, context: int) -> Roofline:
    """Scale a model so that its mean step equals the measured one.

    Args:
        model: the model to scale.
        metrics: a scrape of a worker's ``/metrics`` after a run.
        context: mean context of a sequence in that run, in tokens (the scrape does not tell).

    Raises:
        ConfigurationError: the scrape holds no step.
    """
    steps = _metric(metrics, "penstock_step_seconds_count")
    if steps < 1:
        raise ConfigurationError("the scrape counts no step (penstock_step_seconds_count)")
    seconds = _metric(metrics, "penstock_step_seconds_sum") / steps
    tokens = _metric(metrics, "penstock_step_tokens_sum") / steps
    sequences = _metric(metrics, "penstock_step_sequences_sum") / steps
    work = StepFeatures(
        round(tokens), round(sequences * context), tokens * context, max(1, round(sequences))
    )
    return Roofline(model.hardware, model.model, model.scale * seconds / model.seconds(work))


def _metric(text: str, name: str) -> float:
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found)


def read_metrics(path: Path) -> str:
    """Read the text of a scrape.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"scrape {path} cannot be read: {error}") from error
