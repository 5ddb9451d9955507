"""Where a checkpoint lies. Imports neither torch nor transformers."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from penstock.shared.errors import ModelNotFound

__all__ = ["DEMO", "DEMO_DRAFT", "REMEDY", "checkpoint_files", "find_checkpoint"]

DEMO = "demo"
"""Names the model that is shipped with penstock."""

DEMO_DRAFT = "demo-draft"
"""Names the draft model that is shipped with it."""

REMEDY = (
    "give a directory with config.json, *.safetensors and tokenizer files, a .gguf file, or 'demo'"
)


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


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files at the top of a checkpoint's directory, or the file that it is; sorted."""
    if checkpoint.is_file():
        return [checkpoint]
    return sorted(path for path in checkpoint.iterdir() if path.is_file())
