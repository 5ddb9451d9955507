"""Where a checkpoint lies. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.shared.errors import ModelError, ModelNotFound

__all__ = [
    "DEMO",
    "DEMO_DRAFT",
    "REMEDY",
    "checkpoint_files",
    "find_checkpoint",
    "is_quantized",
    "quantization_in",
    "safetensors_files",
    "single_file",
    "weight_files",
]

DEMO = "demo"
"""Names the model that is shipped with penstock."""

DEMO_DRAFT = "demo-draft"
"""Names the draft model that is shipped with it."""

REMEDY = (
    "give a directory with config.json, tokenizer files and weights (*.safetensors, "
    "pytorch_model.bin, model.onnx or a state dict *.pt), a .gguf file, or 'demo'"
)


_ONNX = ("model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx")
"""As exporters call a decoder's file; each of them has all weights."""


def find_checkpoint(path: str | Path) -> Path:
    """The directory or GGUF file that ``path`` names; ``"demo"`` and ``"demo-draft"`` are shipped.

    A directory without config.json and with one GGUF file stands for that file.

    Raises:
        ModelNotFound: there is none, or it holds no config.json.
    """
    if str(path) in (DEMO, DEMO_DRAFT):
        part = "target" if str(path) == DEMO else "draft"
        folder = Path(str(files("penstock.gpu_worker") / "demo_model" / part))
        if not (folder / "config.json").is_file():
            raise ModelNotFound(
                f"the demo model is missing from this installation ({folder}); reinstall penstock, "
                "or train it with scripts/train_demo_model.py"
            )
        return folder
    folder = Path(path).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ModelNotFound(
            f"model directory {str(path)!r} {what}; {REMEDY} (models are never downloaded)"
        )
    if not (folder / "config.json").is_file():
        single = list(folder.glob("*.gguf"))
        if len(single) == 1:
            return single[0]
        raise ModelNotFound(f"model directory {str(path)!r} has no config.json; {REMEDY}")
    return folder


def is_quantized(checkpoint: Path) -> bool:
    """Whether a checkpoint's configuration says so; GGUF files count, in whatever types they are.

    What cannot be read is not: loading it says why.
    """
    if checkpoint.is_file():
        return True
    try:
        tree = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        return quantization_in(tree) is not None
    except (OSError, ValueError, AttributeError):
        return False


def quantization_in(tree: Mapping[str, Any]) -> Any:
    """``quantization_config`` in what config.json holds, or in its language model's part."""
    parts = (tree, tree.get("text_config") or {})
    found = (part.get("quantization_config") for part in parts)
    return next((described for described in found if described is not None), None)


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files at the top of a checkpoint's directory, or the file that it is; sorted."""
    if checkpoint.is_file():
        return [checkpoint]
    return sorted(path for path in checkpoint.iterdir() if path.is_file())


def safetensors_files(folder: Path) -> list[Path]:
    """The files that weights in safetensors are read from, as transformers chooses; sorted.

    Others may lie beside them, such as Mistral's consolidated.safetensors.

    Returns:
        Paths, of which the index may name some that are not there.

    Raises:
        ModelError: the index cannot be read.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({folder / str(place) for place in places.values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} cannot be read ({error}); copy it again") from error


def single_file(folder: Path) -> Path | None:
    """The ``.onnx``, ``.pt`` or ``.pth`` file that weights are read from.

    Returns:
        None if the folder has weights as transformers itself writes and reads them, or none at all.

    Raises:
        ModelError: there are several, and no name tells which.
    """
    if folder.is_file() or _own_files(folder):
        return None
    found = sorted(path for path in folder.glob("*.onnx") if path.is_file())
    known = [folder / name for name in _ONNX if folder / name in found]
    found = known[:1] or found
    if not found:
        found = sorted(path for end in ("pt", "pth") for path in folder.glob(f"*.{end}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:4])
        raise ModelError(
            f"{folder} has {len(found)} files of weights ({names}); keep the one to be loaded"
        )
    return found[0] if found else None


def weight_files(checkpoint: Path) -> list[Path]:
    """The files that a checkpoint's weights are read from; sorted.

    Beside an ONNX file other names than those of a model's other files are its external data.
    """
    if checkpoint.is_file():
        return [checkpoint]
    single = single_file(checkpoint)
    if single is None:
        return _own_files(checkpoint)
    if single.suffix != ".onnx":
        return [single]
    beside = (
        path
        for path in checkpoint.rglob("*")
        if path.is_file() and path.suffix not in (".onnx", *_OTHERS)
    )
    return sorted((single, *beside))


_OTHERS = (".jinja", ".json", ".md", ".model", ".py", ".txt")


def _own_files(folder: Path) -> list[Path]:
    """Weights in the layout of transformers, safetensors first, as it chooses."""
    found = [path for path in safetensors_files(folder) if path.is_file()]
    return found or sorted(folder.glob("pytorch_model*.bin"))
