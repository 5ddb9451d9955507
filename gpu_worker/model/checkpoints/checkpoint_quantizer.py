"""Writes a quantised copy of a checkpoint, in the format compressed-tensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.shared.errors import ConfigurationError, UnsupportedModel

from ..loading.checkpoint import (
    find_checkpoint,
    load_config,
    load_tokenizer,
    load_weights,
    one_line,
    quiet,
)
from ..quantization.form import QuantizedWeight
from ..quantization.formats.compressed_writer import compressed_config, compressed_tensors_of
from ..quantization.formats.stored_tensors import StoredTensors
from ..quantization.quantizers import quantize_fp8, quantize_int4, quantize_int8
from ..quantization.scale_search import mean_squares, search_scales, with_scales

__all__ = ["LayerReport", "Method", "QuantizeOptions", "quantize_checkpoint"]

Method = Literal["int8", "int4", "fp8"]
Progress = Callable[[str, int, int], None]

_SAMPLE_TOKENS = 512
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
    """

    method: Method = "int4"
    group_size: int = 64
    symmetric: bool = True
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of a linear layer.

    Attributes:
        name: of the layer.
        error: ``|weight - quantised| / |weight|``, Frobenius norms; 0 of a layer left in full.
        bytes_before: of its weight.
        bytes_after: of what stands for it.
        kept: why it stays in full; empty if it does not.
    """

    name: str
    error: float
    bytes_before: int
    bytes_after: int
    kept: str = ""

    def as_json(self) -> dict[str, object]:
        """For ``json.dumps``."""
        return asdict(self)


def quantize_checkpoint(
    source: str | Path, target: Path, options: QuantizeOptions, progress: Progress
) -> list[LayerReport]:
    """Quantise the linear layers of ``source``, all but its head, and write ``target``.

    One weights file after the other: without texts memory holds one layer at a time. ``target``
    appears when all is written.

    Raises:
        ConfigurationError: ``target`` exists or cannot be written, the texts are shorter than two
            tokens, or groups of that size divide no layer's inputs.
        UnsupportedModel: the source is quantised already, or its weights are in other files.
        ModelError: the source cannot be read.
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
            importance = _importance(folder, config, names, options.texts, progress)
            writer = _Writer(tensors, new, options, importance, progress)
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
    described = getattr(config, "quantization_config", None)
    if described is not None:
        tree = described if isinstance(described, dict) else described.to_dict()
        raise UnsupportedModel(
            f"source: {str(folder)!r} is quantised already ({tree.get('quant_method')}); "
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


class _Writer:
    def __init__(
        self,
        tensors: StoredTensors,
        target: Path,
        options: QuantizeOptions,
        importance: dict[str, Tensor],
        progress: Progress,
    ) -> None:
        self.places: dict[str, str] = {}
        self.num_bytes = 0
        self.example: QuantizedWeight | None = None
        self._tensors, self._target, self._options = tensors, target, options
        self._importance, self._progress = importance, progress
        self._reports: list[LayerReport] = []

    def write(self, names: Sequence[str]) -> list[LayerReport]:
        """All files; ``names`` are the linear layers."""
        layers = {f"{name}.weight": name for name in names}
        done = 0
        for path, held in self._tensors.files():
            found: dict[str, Tensor] = {}
            for name in held:
                tensor = self._tensors.read(name)
                if name in layers:
                    self._progress("quantising", done, len(layers))
                    found |= self._layer(layers[name], tensor)
                    done += 1
                else:
                    found[name] = tensor
            save_file(found, self._target / path.name, metadata={"format": "pt"})
            (self._target / path.name).chmod(0o644)
            self.places |= dict.fromkeys(found, path.name)
            self.num_bytes += sum(tensor.nbytes for tensor in found.values())
        return sorted(self._reports, key=lambda report: report.name)

    def _layer(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        why = _why_kept(name, weight, self._options)
        if why:
            self._reports.append(LayerReport(name, 0.0, weight.nbytes, weight.nbytes, why))
            return {f"{name}.weight": weight}
        form = _quantized(weight, self._options, self._importance.get(name))
        self.example = form
        parts = compressed_tensors_of(form, weight.dtype)
        values = weight.float()
        error = float((form.dequantize() - values).norm() / values.norm().clamp_min(1e-30))
        after = sum(part.nbytes for part in parts.values())
        self._reports.append(LayerReport(name, error, weight.nbytes, after))
        return {f"{name}.{end}": part.contiguous() for end, part in parts.items()}


def _linear_layers(config: Any) -> list[str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
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
    weight: Tensor, options: QuantizeOptions, importance: Tensor | None
) -> QuantizedWeight:
    if options.method == "int4":
        form = quantize_int4(weight, group_size=options.group_size, symmetric=options.symmetric)
    else:
        form = (quantize_int8 if options.method == "int8" else quantize_fp8)(weight)
    # Scales are stored in the weights' own type, and so must be exact in it.
    form = with_scales(form, weight, form.scales.to(weight.dtype).float())
    return form if importance is None else search_scales(form, weight, importance, weight.dtype)


def _importance(
    folder: Path, config: Any, names: Sequence[str], texts: Sequence[str], progress: Progress
) -> dict[str, Tensor]:
    if not texts:
        return {}
    progress("loading", 0, 0)
    with quiet():
        tokenizer = load_tokenizer(folder)
        model = load_weights(folder, config, torch.float32, torch.device("cpu"))
    sequences = [tokenizer(text)["input_ids"][:_SAMPLE_TOKENS] for text in texts]
    sequences = [ids for ids in sequences if len(ids) > 1]
    if not sequences:
        raise ConfigurationError("--texts: no text in it has two tokens; give longer ones")

    def told() -> Any:
        for index, ids in enumerate(sequences):
            progress("activations", index, len(sequences))
            yield ids

    return mean_squares(model, names, told())


def _copy_rest(
    folder: Path, target: Path, writer: _Writer, example: QuantizedWeight, kept: Sequence[str]
) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".gguf"):
            shutil.copy(path, target / path.name)
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tree["quantization_config"] = compressed_config(example, ["lm_head", *kept])
    (target / "config.json").write_text(json.dumps(tree, indent=2), encoding="utf-8")
    if (folder / _INDEX).is_file():
        index = {"metadata": {"total_size": writer.num_bytes}, "weight_map": writer.places}
        (target / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
