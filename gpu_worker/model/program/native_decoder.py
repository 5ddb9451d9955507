"""A model's step in one call of the native library, where that computes what the model computes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels.cpu import (
    BoundStep,
    Cache,
    Draws,
    Library,
    MatrixForm,
    NativeProgram,
    NativeUnavailable,
    ThreadPool,
    WeightsFile,
    load_library,
)
from penstock.shared.local.cores import usable_cores

from ..forward.batch import PackedStep
from ..forward.step_buffers import StepBuffers
from ..kv.kv_pool import KVPool
from ..kv.memory_budget import available_bytes, format_bytes
from ..loading.geometry import KVGeometry
from ..loading.trial import ROUTED_SHARE, Trial, are_within
from ..quantization.coding import Linear, is_coded_otherwise, is_permuted, packed_bytes
from ..quantization.quantized_modules import QuantizedLinear
from ..sampling.gumbel_sampling import SampledRows
from ..sampling.row_operations import TorchRows
from .assembly import assemble
from .decoder_record import DecoderRecord, record_decoder
from .description import Decoder, describe
from .modules import Unrecognised
from .prepared_step import LargestLogits, PreparedStep, StepLogits

__all__ = ["NativeDecoder", "NativeRuntime", "NoRoomToPack"]

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Largest relative L2 difference of one token's logits from the model's own forward. In bfloat16
the two round in other places; how far apart that leads is the load gate's tolerance."""


class NoRoomToPack(NativeUnavailable):
    """Packed weights do not fit beside those that they are made of."""


class NativeRuntime:
    """The native library and its threads; the models of a process share one.

    Args:
        library: the library; None builds or finds that of this machine.

    Raises:
        NativeUnavailable: it cannot be had.
    """

    def __init__(self, library: Library | None = None) -> None:
        self.library = load_library() if library is None else library
        self._cores = usable_cores()
        self._pinned = False
        self._pool: ThreadPool | None = None

    @property
    def threads(self) -> ThreadPool:
        """As many as torch computes with, and never more than the cores this process may use."""
        count = min(torch.get_num_threads(), self._cores)
        if self._pool is None or self._pool.threads != count:
            self._pool = ThreadPool(self.library, count, pinned=self._pinned)
        return self._pool

    def pin_threads(self) -> None:
        """Keep each thread but the calling one to a core of its own from now on."""
        self._pinned, self._pool = True, None


class NativeDecoder:
    """Runs packed steps; its KV pool has the layout ``KVLayout.GROUPS``, or ``GROUPS_INT8``.

    Use :meth:`of`, which takes a model only if the program computes the same.

    Args:
        program: the model's.
        runtime: the threads.
        vocab_size: width of the logits.
        multiplied_weights: that a row is multiplied with.
        record: the description that the program was made of; None if it cannot be recorded.
    """

    def __init__(
        self,
        program: NativeProgram,
        runtime: NativeRuntime,
        vocab_size: int,
        multiplied_weights: int,
        record: DecoderRecord | None = None,
    ) -> None:
        self.program = program
        self.multiplied_weights = multiplied_weights
        self.record = record
        self.runtime = runtime
        self._vocab_size = vocab_size
        # Weak, so that a pool that its owner drops is gone.
        self._caches: weakref.WeakKeyDictionary[KVPool, Cache] = weakref.WeakKeyDictionary()
        self._latest: StepLogits | None = None
        # Of steps in memory that stays in place, see :class:`..forward.step_buffers.StepBuffers`.
        self._prepared: weakref.WeakKeyDictionary[StepBuffers, PreparedStep]
        self._prepared = weakref.WeakKeyDictionary()
        self._scratch = torch.empty(0, vocab_size)

    @classmethod
    def of(
        cls,
        model: Any,
        geometry: KVGeometry,
        positions: int,
        trial: Trial,
        runtime: NativeRuntime | None = None,
    ) -> NativeDecoder:
        """The native form of ``model``, whose linear layers' weights are given up for it.

        Args:
            model: of transformers, on the CPU.
            geometry: of its KV, in the library's layout.
            positions: the longest sequence's, in tokens.
            trial: what its own forward gives.
            runtime: the library and threads; None makes them.

        Raises:
            NativeUnavailable: there is no library here, or the model cannot take this way; says
                why in one line. The model is as it was.
        """
        if model.device.type != "cpu" or model.dtype not in TOLERANCE:
            raise NativeUnavailable(f"it computes in {model.dtype} on {model.device}")
        runtime = NativeRuntime() if runtime is None else runtime
        try:
            decoder = describe(model, geometry, max(positions, len(trial.one)))
            _check_memory(decoder, model.dtype)
            program = assemble(decoder, runtime.library, model.dtype)
            _report_mixed(decoder, model.dtype)
            record = record_decoder(decoder, _parameter_names(model))
            vocab_size = decoder.head.out_features
            native = cls(program, runtime, vocab_size, decoder.multiplied_weights, record)
            differences = trial.differences(native.forward, geometry)
            selection = trial.selection_difference(native.forward, geometry)
        except Unrecognised as error:
            raise NativeUnavailable(f"a program cannot compute {error}") from error
        except NativeUnavailable:
            raise
        except Exception as error:
            # Whatever a family keeps elsewhere than the others: the model runs all the same.
            log.debug("no native program", exc_info=True)
            raise NativeUnavailable(f"its modules are not as expected ({error})") from error
        routed = model.dtype != torch.float32 and any(decoder.mixtures())
        agree = are_within(differences, TOLERANCE[model.dtype], ROUTED_SHARE if routed else 0.0)
        difference = float(torch.cat(differences).max())
        # Not within, rather than above: NaN is neither.
        if not (agree and selection <= TOLERANCE[torch.float32]):
            raise NativeUnavailable(f"the program's logits differ by {difference:.2g}")
        log.info("native program: logits differ from transformers' own by %.2g", difference)
        _give_up_weights(decoder)
        return native

    @classmethod
    def of_description(
        cls,
        decoder: Decoder,
        dtype: torch.dtype,
        runtime: NativeRuntime,
        packed: WeightsFile | None = None,
        forms: Sequence[MatrixForm] | None = None,
    ) -> NativeDecoder:
        """The native form of a description that an earlier start has tried.

        Args:
            decoder: the description.
            dtype: in which it computes.
            runtime: the threads.
            packed: a file with its packed weights; None: it has them.
            forms: of its matrices, where it has the weights and an earlier start found them out.

        Raises:
            NativeUnavailable: memory is short.
            ValueError: the file has other weights.
        """
        _check_memory(decoder, dtype)
        program = assemble(decoder, runtime.library, dtype, packed, forms)
        return cls(program, runtime, decoder.head.out_features, decoder.multiplied_weights)

    def keep_kv_in_int8(self) -> None:
        """Take pools of the layout ``KVLayout.GROUPS_INT8`` from now on, and no other."""
        self.program.keep_cache_in_int8()
        self._caches.clear()
        self._prepared.clear()

    def forward(
        self, step: PackedStep, pool: KVPool, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """As :meth:`.LoadedModel.forward`; the logits are float32.

        ``meanwhile`` runs on the calling thread while the pool's other threads compute.
        """
        return self.run(self.prepare(step, pool), meanwhile)

    def prepare(self, step: PackedStep, pool: KVPool) -> PreparedStep:
        """What :meth:`run` takes; its tokens may still change in place."""
        known = None if step.buffers is None else self._prepared.get(step.buffers)
        if known is not None and step.largest_only and known.is_of(step, pool):
            return known
        count = step.num_rows
        logits = self._logits(count, keeps=not step.largest_only)
        largest = LargestLogits(count)
        bound = BoundStep.of(
            step.input_ids, step.rows, step.batches, self._cache(pool), logits, largest.tensors,
            largest_only=step.largest_only,
        )  # fmt: skip
        # Not all logits may be there if the largest alone are asked for.
        given = torch.empty(count, 0) if step.largest_only else logits
        tables = [batch.host_block_tables for batch in step.batches]
        prepared = PreparedStep(bound, given, largest, weakref.ref(pool), tables)
        if step.buffers is not None and step.largest_only:
            self._prepared[step.buffers] = prepared
        return prepared

    def run(self, step: PreparedStep, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """As :meth:`forward`."""
        self.program.run(self.runtime.threads, step.bound, meanwhile)
        self._latest = StepLogits(weakref.ref(step.logits), step.largest)
        return step.logits

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`..sampling.gumbel_sampling.largest`, by the step's threads.

        Torch has threads of its own, and while both kinds look for work they share the cores. For
        the last step's logits, :meth:`forward` has found the result already. The first caller gets
        that result and may change it; a second caller has the rows searched again. No caller may
        change the logits in place.
        """
        known = self._take_largest(logits)
        if known is not None:
            return known.tensors
        threads = self.runtime.threads
        return threads.largest(logits) if _are_rows(logits) else TorchRows().largest(logits)

    def largest_as_lists(self, logits: Tensor) -> tuple[list[float], list[int]]:
        """:meth:`largest` as lists."""
        known = self._take_largest(logits)
        if known is not None:
            return known.lists()
        values, places = self.largest(logits)
        return values.tolist(), places.tolist()

    def draw(self, logits: Tensor, largest: Tensor, sampled: SampledRows) -> Tensor:
        """As :func:`..sampling.gumbel_sampling.draw`, by the step's threads."""
        if not _are_rows(logits):
            return TorchRows().draw(logits, largest, sampled)
        keys, filters = sampled.keys, sampled.filters
        limits = () if filters is None else (filters.top_k, filters.top_p, filters.log_min_p)
        draws = Draws(
            sampled.rows, sampled.temperature, keys.seeds, keys.choices, keys.indexes, keys.stream,
            *limits,
        )  # fmt: skip
        return self.runtime.threads.draw(logits, largest, draws)

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :class:`..sampling.row_operations.RowOperations` has it, by the step's threads."""
        if not _are_rows(logits):
            return TorchRows().logprobs(logits, rows, tokens, width)
        highest, _ = self.largest(logits)
        return self.runtime.threads.logprobs(logits, highest, rows, tokens, width)

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """As :class:`..sampling.row_operations.RowOperations` has it, by the step's threads."""
        operations = self.runtime.threads if _are_rows(logits) else TorchRows()
        operations.forbid(logits, rows, masks)

    @property
    def summary(self) -> str:
        """What computes, in a few words."""
        return f"computed natively ({self.runtime.library.name})"

    def take_times(self) -> dict[str, float]:
        """Seconds spent in each kind of operation since the last call."""
        return self.program.take_times()

    def _take_largest(self, logits: Tensor) -> LargestLogits | None:
        """What the last step found in these logits, once; None if they are not its own."""
        latest, self._latest = self._latest, None
        return latest.largest if latest is not None and latest.logits() is logits else None

    def _logits(self, count: int, *, keeps: bool) -> Tensor:
        """Where a step writes so many rows of logits.

        Steps that give the largest alone share one place, as one of them runs at a time.
        """
        if keeps:
            return torch.empty(count, self._vocab_size)
        if self._scratch.shape[0] < count:
            self._prepared.clear()  # they hold the old place
            self._scratch = torch.empty(2 * count, self._vocab_size)
        return self._scratch[:count]

    def _cache(self, pool: KVPool) -> Cache:
        cache = self._caches.get(pool)
        if cache is None:
            layers = [(layer.key, layer.value) for layer in pool.layers]
            cache = self.program.bind(layers, [layer.group for layer in pool.layers])
            self._caches[pool] = cache
        return cache


def _are_rows(logits: Tensor) -> bool:
    """Whether the library can read them."""
    return logits.dtype == torch.float32 and logits.stride(-1) == 1


def _parameter_names(model: Any) -> dict[int, str]:
    """By the address of their data; of parameters that share it, the first."""
    return {parameter.data_ptr(): name for name, parameter in model.named_parameters()}


def _report_mixed(decoder: Decoder, dtype: torch.dtype) -> None:
    """Say which quantised layers take more memory than their own codes."""
    whys: dict[str, list[tuple[Linear, ...]]] = {}
    for matrix in decoder.matrices():
        coded = any(isinstance(layer, QuantizedLinear) for layer in matrix)
        more = packed_bytes(matrix, dtype) > sum(packed_bytes((layer,), dtype) for layer in matrix)
        if any(is_permuted(layer) for layer in matrix):
            whys.setdefault(_PERMUTED, []).append(matrix)
        elif any(is_coded_otherwise(layer) for layer in matrix):
            whys.setdefault(_OTHERWISE, []).append(matrix)
        elif coded and more:
            whys.setdefault(_DIFFERENT, []).append(matrix)
    for why, matrices in whys.items():
        layers = [layer for matrix in matrices for layer in matrix]
        count = sum(1 for layer in layers if isinstance(layer, QuantizedLinear))
        taken = sum(packed_bytes(matrix, dtype) for matrix in matrices)
        own = sum(
            layer.quantized.packed_bytes
            if isinstance(layer, QuantizedLinear)
            else packed_bytes((layer,), dtype)
            for layer in layers
        )
        log.warning(why, count, format_bytes(taken), format_bytes(own))


_PERMUTED = (
    "%d linear layers have permuted inputs (desc_act) and are computed with dequantised weights: "
    "%s instead of %s in memory; a checkpoint without desc_act stays in its codes"
)
_OTHERWISE = (
    "%d linear layers have groups whose inputs are no multiple of 4 (of 2 in 8 bits) and are "
    "computed with dequantised weights: %s instead of %s in memory; a checkpoint with groups of "
    "32, 64 or 128 stays in its codes"
)
_DIFFERENT = (
    "%d linear layers are parts of products whose parts are quantised differently, and take the "
    "form of the largest, or are dequantised where they have none in common: %s instead of %s in "
    "memory; a checkpoint with one type for queries, keys and values stays in its codes"
)


def _check_memory(decoder: Decoder, dtype: torch.dtype) -> None:
    needed = sum(packed_bytes(matrix, dtype) for matrix in decoder.matrices())
    spare = available_bytes(torch.device("cpu"))
    if needed > spare:
        raise NoRoomToPack(
            f"packing its weights takes {format_bytes(needed)}, and {format_bytes(spare)} are free "
            "beside them"
        )


def _give_up_weights(decoder: Decoder) -> None:
    """Free the weights that the program has copies of; the embedding's may be the head's, too."""
    kept = decoder.embedding.data_ptr()
    for linear in list(decoder.linears()):
        if isinstance(linear, QuantizedLinear):
            linear.give_up_weight()
        elif isinstance(linear, nn.Linear) and linear.weight.data_ptr() != kept:
            linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    for mixture in decoder.mixtures():
        mixture.give_up_weights()
