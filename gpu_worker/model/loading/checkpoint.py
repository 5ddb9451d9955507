"""Reads a transformers checkpoint from a directory, and reports each fault in one line.

transformers reports the same fault by different exceptions, or only warns and invents weights. Here
every fault becomes one of the errors in ``penstock.shared.errors``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from penstock.shared import quoting
from penstock.shared.errors import (
    InsufficientMemory,
    ModelError,
    ModelNotFound,
    PenstockError,
    UnsupportedModel,
)

from ..checkpoints.gguf_file import GGUFSource
from ..checkpoints.gguf_settings import complete_config
from ..checkpoints.named_weights import build_named, listed, parameter_bytes
from ..checkpoints.onnx_file import onnx_weights
from ..checkpoints.quantized_model import build_quantized, move_quantized
from ..checkpoints.torch_file import torch_weights
from ..kv.memory_budget import available_bytes, format_bytes
from ..quantization.formats.checkpoint_formats import format_of
from ..quantization.formats.quantized_source import QuantizedSource, SafetensorsSource
from ..quantization.formats.stored_tensors import StoredTensors
from ..quantization.formats.weight_format import CONVERT
from . import load_gate
from .checkpoint_folder import (
    DEMO,
    DEMO_DRAFT,
    REMEDY,
    find_checkpoint,
    safetensors_files,
    single_file,
    weight_files,
)
from .stored_sizes import loaded_bytes, usable_bytes

__all__ = [
    "DEMO",
    "DEMO_DRAFT",
    "find_checkpoint",
    "load_config",
    "load_tokenizer",
    "load_weights",
    "one_line",
    "quantized_source",
    "quiet",
    "stored_quantization",
]

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is downloaded, and no code of a checkpoint runs. Without the second option transformers
would ask on standard input whether to run such code."""


_EXPORT_REMEDY = (
    "export the model for text generation anew, by torch.onnx.export or optimum, and keep the "
    "nodes' names: optimising the graph may lose them; or convert the original to safetensors"
)
_CODES = ", with a byte for each code until they are packed,"
_RENAME_REMEDY = "save model.state_dict() of transformers' own model, best with safetensors"


def _where(checkpoint: Path) -> dict[str, Any]:
    """How transformers is told of a directory, or of a GGUF file."""
    if checkpoint.suffix != ".gguf":
        return {"pretrained_model_name_or_path": checkpoint}
    return {"pretrained_model_name_or_path": checkpoint.parent, "gguf_file": checkpoint.name}


def load_config(folder: Path) -> Any:
    """The configuration in ``folder``.

    Raises:
        ModelError: it cannot be read.
        UnsupportedModel: transformers does not know its model type; or a setting of a GGUF file is
            not served.
    """
    try:
        config = AutoConfig.from_pretrained(**_where(folder), **LOCAL)
        if folder.suffix == ".gguf":
            complete_config(config, folder)
    except PenstockError:
        raise
    except Exception as error:
        text = one_line(error)
        if "does not recognize this architecture" in text or "contains custom code" in text:
            raise UnsupportedModel(
                f"the model in {folder} is of a type that the installed transformers does not "
                f"know without running code of the checkpoint ({text}); {load_gate.REMEDY}"
            ) from error
        raise ModelError(
            f"{folder if folder.is_file() else folder / 'config.json'} cannot be read: {text}; "
            "copy the checkpoint again"
        ) from error
    return config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``.

    Raises:
        ModelNotFound: there is none, it is damaged, or it knows no token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(**_where(folder), **LOCAL)
    except Exception as error:
        raise ModelNotFound(
            f"no usable tokenizer in {folder}: {one_line(error)}; copy the checkpoint's "
            "tokenizer files (tokenizer.json, tokenizer_config.json) there"
        ) from error
    if len(tokenizer) == 0:
        raise ModelNotFound(
            f"the tokenizer in {folder} has an empty vocabulary; copy the checkpoint's tokenizer "
            "files (tokenizer.json, tokenizer_config.json) there"
        )
    return tokenizer


def load_weights(
    folder: Path,
    config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    head: Any = AutoModelForCausalLM,
    unused: tuple[str, ...] = (),
) -> Any:
    """The model in ``folder`` with its weights, on ``device``, in eval mode and without gradients.

    Args:
        folder: the checkpoint.
        config: its configuration.
        dtype: of the weights; ``"auto"`` for the checkpoint's own.
        device: where they go.
        head: transformers' class that chooses the model's.
        unused: what the names of weights begin with that may be missing.

    Raises:
        ModelNotFound: there are no weights.
        ModelError: they are damaged, incomplete or of other shapes than the configuration says.
        InsufficientMemory: they do not fit.
    """
    try:
        source = quantized_source(folder, config) if head is AutoModelForCausalLM else None
        _check_memory(folder, dtype, config, device, source)
        model, report = _read_weights(folder, config, dtype, head, source)
        move_quantized(model.to(device))
    except PenstockError:
        raise
    except torch.OutOfMemoryError as error:
        raise InsufficientMemory(
            f"the weights in {folder} do not fit on {device} ({one_line(error)}); use a smaller "
            "dtype, a quantised checkpoint or a larger device"
        ) from error
    except Exception as error:
        raise _weights_error(folder, error) from error
    _check_report(folder, report, unused, is_quantized=source is not None)
    model.eval().requires_grad_(False)
    return model


def _read_weights(
    folder: Path,
    config: Any,
    dtype: torch.dtype | str,
    head: Any,
    source: QuantizedSource | None,
) -> tuple[Any, Mapping[str, Any]]:
    """The model with its weights on the CPU, and transformers' report of what did not fit."""
    is_decoder = head is AutoModelForCausalLM
    single = single_file(folder) if is_decoder else None
    if source is not None:
        model, report = build_quantized(source, config, dtype)
    elif single is not None:
        is_onnx = single.suffix == ".onnx"
        weights = onnx_weights(single) if is_onnx else torch_weights(single)
        remedy = _EXPORT_REMEDY if is_onnx else _RENAME_REMEDY
        model, report = build_named(single, weights, config, dtype, remedy)
    else:
        return head.from_pretrained(  # type: ignore[no-any-return]
            folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and refused here by name
            **LOCAL,
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, **LOCAL)
    return model, report


def _check_report(
    folder: Path, report: Mapping[str, Any], unused: tuple[str, ...], *, is_quantized: bool
) -> None:
    """Refuse weights that are missing or of another shape; those of other names may be why.

    A quantised checkpoint may have its own tensors beside codes, without which the output is wrong.
    """
    mismatched = sorted(report.get("mismatched_keys", ()))
    if mismatched:
        name, found, expected = mismatched[0]
        raise ModelError(
            f"{len(mismatched)} weights in {folder} have other shapes than config.json says, such "
            f"as {name!r} with {list(found)} instead of {list(expected)}; copy both again"
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(unused))
    unknown = sorted(report.get("unexpected_keys", ()))
    if missing:
        others = f" and has {len(unknown)} of unknown names ({listed(unknown)})" if unknown else ""
        raise ModelError(
            f"the checkpoint in {folder} lacks {len(missing)} weights ({listed(missing)}){others}; "
            "copy it again, all its files"
        )
    if is_quantized and unknown:
        raise UnsupportedModel(
            f"the quantised checkpoint in {folder} has {len(unknown)} tensors that the model has "
            f"no place for ({listed(unknown)}), and would compute without them; {CONVERT}"
        )


def quantized_source(folder: Path, config: Any) -> QuantizedSource | None:
    """What the weights in ``folder`` are read from if they are quantised; None: they are not.

    Raises:
        ModelNotFound: there are none.
        UnsupportedModel: they are in a format, or of a size, that is not served.
        ModelError: a file is damaged.
    """
    if folder.suffix == ".gguf":
        return GGUFSource(folder, config)
    described = stored_quantization(folder, config)
    return (
        None
        if described is None
        else SafetensorsSource(StoredTensors(folder), format_of(described))
    )


def stored_quantization(folder: Path, config: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint, or of the language model in it.

    Args:
        folder: the checkpoint.
        config: its configuration.

    Returns:
        None: its weights are in full. Of a GGUF file with blocks it says only that.
    """
    if folder.suffix == ".gguf":
        return {"quant_method": "gguf"} if GGUFSource(folder, config).modules else None
    for part in (config, config.get_text_config(decoder=True)):
        described = getattr(part, "quantization_config", None)
        if described is not None:
            return described if isinstance(described, dict) else dict(described.to_dict())
    return None


def _weights_error(folder: Path, error: Exception) -> ModelError:
    text = one_line(error)
    if isinstance(error, SafetensorError):
        return ModelError(
            f"a weights file in {folder} is damaged ({_damaged(folder)}{text}); copy it again"
        )
    if isinstance(error, OSError):
        return ModelNotFound(f"no weights in {folder}: {text}; {REMEDY}")
    if isinstance(error, ImportError):
        return ModelError(f"the model in {folder} needs a package that is not installed: {text}")
    return ModelError(f"the checkpoint in {folder} cannot be loaded: {text}; copy it again")


def _damaged(folder: Path) -> str:
    """Names the first safetensors file that cannot be opened."""
    for path in safetensors_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return f"{path.name}: "
    return ""


def _check_memory(
    folder: Path,
    dtype: torch.dtype | str,
    config: Any,
    device: torch.device,
    source: QuantizedSource | None,
) -> None:
    """Refuse before the system's out-of-memory killer acts, by the arithmetic of penstock plan."""
    stored = getattr(config, "dtype", None) if dtype == "auto" else dtype
    if not isinstance(stored, torch.dtype):
        return
    available = available_bytes(device)
    needed = loaded_bytes(folder, stored) if source is None else source.num_bytes(stored).loaded
    by_config = needed == 0 and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if by_config and not any(folder.glob("*.safetensors")) and weight_files(folder):
        needed = parameter_bytes(config, stored)
    missing = needed - usable_bytes(available)
    if missing > 0:
        raise InsufficientMemory(
            f"the weights in {folder} take {format_bytes(needed)} as "
            f"{str(stored).removeprefix('torch.')}{'' if source is None else _CODES} and {device} "
            f"has {format_bytes(available)} available, of which a tenth is kept free: "
            f"{format_bytes(missing)} are missing; use a smaller dtype (bfloat16), a copy by "
            "penstock quantize, a smaller model or a larger machine (penstock plan shows what fits)"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports: what matters is raised or logged here."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """The message of ``error`` in one line of bounded length."""
    return quoting.one_line(" ".join(str(error).split()) or type(error).__name__, 300)
