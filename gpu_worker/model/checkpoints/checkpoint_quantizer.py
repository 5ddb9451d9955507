"""Writes a quantised copy of a checkpoint, in the format compressed-tensors."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.shared.errors import ConfigurationError, UnsupportedModel

from ..loading import load_gate
from ..loading.checkpoint import (
    find_checkpoint,
    load_config,
    load_tokenizer,
    load_weights,
    one_line,
    quiet,
    stored_quantization,
)
from ..quantization.form import QuantizedWeight
from ..quantization.formats.compressed_writer import compressed_config, compressed_tensors_of
from ..quantization.formats.stored_tensors import StoredTensors
from ..quantization.quantizers import quantize_fp8, quantize_int4, quantize_int8
from ..quantization.scale_search import observe, search_scales, with_scales
from .channel_scaling import ChannelScaling, scale_channels
from .scale_folding import find_folds

__all__ = ["LayerReport", "Method", "QuantizeOptions", "quantize_checkpoint"]

Method = Literal["int8", "int4", "fp8"]
Progress = Callable[[str, int, int], None]

T = TypeVar("T")

_SAMPLE_TOKENS = 512
_SAMPLE_ROWS = 512
_TRIAL_TOKENS = 32
_COPIED = ("", ".bpe", ".jinja", ".json", ".md", ".model", ".py", ".spm", ".tiktoken", ".txt")
"""Suffixes of files that a copy takes over: configurations, tokenizers, licences. No weights."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How to quantise.

    Attributes:
        method: ``int8`` and ``fp8`` with a scale for each output, ``int4`` by groups of inputs.
        group_size: of ``int4``. A layer whose inputs it does not divide stays in full.
        symmetric: of ``int4``: codes around zero, instead of between a group's extremes.
        texts: what scales are chosen by, see :mod:`..quantization.scale_search`; empty: they cover
            all weights.
        scale_channels: also scale channels before their weights are rounded, see
            :mod:`.channel_scaling`; needs texts.
    """

    method: Method = "int4"
    group_size: int = 64
    symmetric: bool = True
    texts: Sequence[str] = ()
    scale_channels: bool = False


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of a linear layer.

    Attributes:
        name: of the layer.
        error: ``|weight - quantised| / |weight|``, Frobenius norms; 0 of a layer left in full.
        bytes_before: of its weight.
        bytes_after: of what stands for it.
        kept: why it stays in full; empty if it does not.
        alpha: the exponent of its inputs' scales; None: they cannot be scaled, or were not to be.
        outputs_unscaled: ``|outputs - quantised outputs| / |outputs|`` on the texts without such
            scales; None where ``alpha`` is.
        outputs_error: the same with them.
        unscaled: why its inputs cannot be scaled; empty if they can or were not to be.
    """

    name: str
    error: float
    bytes_before: int
    bytes_after: int
    kept: str = ""
    alpha: float | None = None
    outputs_unscaled: float | None = None
    outputs_error: float | None = None
    unscaled: str = ""

    def as_json(self) -> dict[str, object]:
        """For ``json.dumps``."""
        return asdict(self)


def quantize_checkpoint(
    source: str | Path, target: Path, options: QuantizeOptions, progress: Progress
) -> list[LayerReport]:
    """Quantise the linear layers of ``source``, all but its head, and write ``target``.

    One weights file after the other: without texts memory holds the codes of one file, and one
    layer in full. ``target`` appears when all is written.

    Raises:
        ConfigurationError: ``target`` exists or cannot be written, the texts are shorter than two
            tokens, or groups of that size divide no layer's inputs.
        UnsupportedModel: the source is quantised already, its weights are in other files, or it is
            no causal language model.
        ModelError: the source cannot be read, or a weight is not finite; names the tensor.
    """
    folder = find_checkpoint(source)
    if target.exists():
        raise ConfigurationError(
            f"target: got {str(target)!r}, which exists already; name a directory that does not"
        )
    with quiet():
        config = load_config(folder)
        _check_source(folder, config)
        layers = _linear_layers(config)
    tensors = StoredTensors(folder)
    names = [name for name in layers if f"{name}.weight" in tensors.names]
    try:
        with _scratch(target) as new:
            calibration = _calibrated(folder, config, names, tensors, options, progress)
            writer = _Writer(tensors, new, options, calibration, progress)
            reports = writer.write(names)
            if writer.example is None:
                raise _nothing_quantised(folder, reports, options)
            _copy_rest(folder, new, writer, writer.example, [r.name for r in reports if r.kept])
            new.rename(target)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"target: {str(target)!r} cannot be written ({one_line(error)}); "
            "make room there, or name a directory elsewhere"
        ) from error
    return reports


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A new directory beside ``target``, which is gone afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".quantize-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir(mode=0o755)
        yield new


def _check_source(folder: Path, config: Any) -> None:
    described = stored_quantization(folder, config)
    if described is not None:
        raise UnsupportedModel(
            f"source: {str(folder)!r} is quantised already ({described.get('quant_method')}); "
            "give the full checkpoint, or serve this one as it is"
        )
    if folder.is_file() or not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"source: {str(folder)!r} has no *.safetensors, which alone are quantised; "
            "give the full model as transformers' save_pretrained writes it"
        )


def _nothing_quantised(
    folder: Path, reports: Sequence[LayerReport], options: QuantizeOptions
) -> Exception:
    if reports and all(report.kept.startswith("groups of") for report in reports):
        return ConfigurationError(
            f"--group-size: got {options.group_size}, which divides the inputs of no layer in "
            f"{str(folder)!r}; allowed: a divisor of a layer's inputs, such as 32"
        )
    return UnsupportedModel(
        f"source: {str(folder)!r} has no linear layer that can be quantised; serve it as it is"
    )


@dataclass(frozen=True, slots=True)
class _Calibration:
    """What texts gave; empty without any."""

    mean_squares: Mapping[str, Tensor] = field(default_factory=dict)
    scaling: ChannelScaling = field(default_factory=ChannelScaling)
    unscaled: Mapping[str, str] = field(default_factory=dict)


class _Writer:
    def __init__(
        self,
        tensors: StoredTensors,
        target: Path,
        options: QuantizeOptions,
        calibration: _Calibration,
        progress: Progress,
    ) -> None:
        self.places: dict[str, str] = {}
        self.num_bytes = 0
        self.example: QuantizedWeight | None = None
        self._tensors, self._target, self._options = tensors, target, options
        self._calibration, self._progress = calibration, progress
        self._reports: list[LayerReport] = []

    def write(self, names: Sequence[str]) -> list[LayerReport]:
        """All files; ``names`` are the linear layers."""
        layers = {f"{name}.weight": name for name in names}
        scaling, done = self._calibration.scaling, 0
        for path, held in self._tensors.files():
            found: dict[str, Tensor] = {}
            for name in held:
                tensor = self._tensors.read(name)
                if name in layers:
                    self._progress("quantising", done, len(layers))
                    found |= self._layer(layers[name], tensor)
                    done += 1
                else:
                    found[name] = scaling.applied(name, tensor).to(tensor.dtype)
            save_file(found, self._target / path.name, metadata={"format": "pt"})
            (self._target / path.name).chmod(0o644)
            self.places |= dict.fromkeys(found, path.name)
            self.num_bytes += sum(tensor.nbytes for tensor in found.values())
        return sorted(self._reports, key=lambda report: report.name)

    def _layer(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        scaling = self._calibration.scaling
        values = scaling.applied(f"{name}.weight", weight)
        why = _why_kept(name, weight, self._options)
        if why:
            self._reports.append(LayerReport(name, 0.0, weight.nbytes, weight.nbytes, why))
            return {f"{name}.weight": values.to(weight.dtype)}
        squares = self._calibration.mean_squares.get(name)
        if squares is not None:
            squares = scaling.mean_squares(name, squares)
        values = values.float()
        form = _rounded(self._tensors, self._options, name, values, weight.dtype, squares)
        self.example = form
        parts = compressed_tensors_of(form, weight.dtype)
        error = float((form.dequantize() - values).norm() / values.norm().clamp_min(1e-30))
        after = sum(part.nbytes for part in parts.values())
        report = LayerReport(name, error, weight.nbytes, after)
        scaled = scaling.layers.get(name)
        if scaled is not None:
            report = replace(
                report, alpha=scaled.alpha, outputs_unscaled=scaled.before,
                outputs_error=scaled.after,
            )  # fmt: skip
        unscaled = self._calibration.unscaled.get(name, "")
        self._reports.append(replace(report, unscaled=unscaled))
        return {f"{name}.{end}": part.contiguous() for end, part in parts.items()}


def _linear_layers(config: Any) -> list[str]:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        why = f"its linear layers cannot be found ({one_line(error)})"
        raise load_gate.unsupported(config, why) from error
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]


def _why_kept(name: str, weight: Tensor, options: QuantizeOptions) -> str:
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it holds {weight.dtype}"
    if options.method == "int4" and weight.shape[1] % options.group_size:
        return f"groups of {options.group_size} do not divide its {weight.shape[1]} inputs"
    if name.endswith(("router", "gate")):
        return "it chooses experts"
    return ""


def _quantized(
    weight: Tensor, dtype: torch.dtype, options: QuantizeOptions, importance: Tensor | None
) -> QuantizedWeight:
    if options.method == "int4":
        form = quantize_int4(weight, group_size=options.group_size, symmetric=options.symmetric)
    else:
        form = (quantize_int8 if options.method == "int8" else quantize_fp8)(weight)
    # Scales are stored in the weights' own type, and so must be exact in it.
    form = with_scales(form, weight, form.scales.to(dtype).float())
    return form if importance is None else search_scales(form, weight, importance, dtype)


def _calibrated(
    folder: Path,
    config: Any,
    names: Sequence[str],
    tensors: StoredTensors,
    options: QuantizeOptions,
    progress: Progress,
) -> _Calibration:
    if not options.texts:
        return _Calibration()
    progress("loading", 0, 0)
    with quiet():
        tokenizer = load_tokenizer(folder)
        model = load_weights(folder, config, torch.float32, torch.device("cpu"))
    sequences = [tokenizer(text)["input_ids"][:_SAMPLE_TOKENS] for text in options.texts]
    sequences = [ids for ids in sequences if len(ids) > 1]
    if not sequences:
        raise ConfigurationError("--texts: no text in it has two tokens; give longer ones")
    told = _told("activations", sequences, progress)
    if not options.scale_channels:
        return _Calibration(observe(model, names, told).mean_squares)
    progress("trying scales", 0, 0)
    found, unscaled = find_folds(model, names, sequences[0][:_TRIAL_TOKENS])
    rounded = [n for n in names if not _why_kept(n, tensors.read(f"{n}.weight"), options)]
    folds = []
    for fold in found:
        if f"{fold.source}.weight" not in tensors.names:
            unscaled |= dict.fromkeys(fold.readers, f"{fold.source} is stored under another name")
        elif not set(rounded).isdisjoint(fold.readers):
            folds.append(fold)
    sampled = {fold.readers[0] for fold in folds}
    each = max(1, _SAMPLE_ROWS // len(sequences))
    activations = observe(model, names, told, sampled, each)
    del model
    rounding = {name: functools.partial(_rounded, tensors, options, name) for name in rounded}
    scaling = scale_channels(_told("scaling", folds, progress), tensors, activations, rounding)
    return _Calibration(activations.mean_squares, scaling, unscaled)


def _told(step: str, things: Sequence[T], progress: Progress) -> Iterator[T]:
    for index, thing in enumerate(things):
        progress(step, index, len(things))
        yield thing


def _rounded(
    tensors: StoredTensors,
    options: QuantizeOptions,
    layer: str,
    weight: Tensor,
    dtype: torch.dtype,
    importance: Tensor | None,
) -> QuantizedWeight:
    try:
        return _quantized(weight, dtype, options, importance)
    except ValueError as error:
        raise tensors.fault(f"{layer}.weight", str(error)) from error


def _copy_rest(
    folder: Path, target: Path, writer: _Writer, example: QuantizedWeight, kept: Sequence[str]
) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, target / path.name)
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tree["quantization_config"] = compressed_config(example, ["lm_head", *kept])
    (target / "config.json").write_text(json.dumps(tree, indent=2), encoding="utf-8")
    if (folder / _INDEX).is_file():
        index = {"metadata": {"total_size": writer.num_bytes}, "weight_map": writer.places}
        (target / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
