"""What a GGUF file says of its model beyond what transformers reads: honoured, or refused by name.

transformers takes sizes and the base of the rotary embedding. It leaves how positions are scaled,
and would compute with the unscaled ones. Names and meanings of the settings are llama.cpp's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.shared.errors import ModelError, UnsupportedModel

__all__ = ["ARCHITECTURES", "complete_config", "is_a_setting", "open_gguf"]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Whose conversion changes nothing but the order of rows and norms."""

_REMEDY = (
    "use the model's own checkpoint in safetensors, with --quantization or by penstock quantize if "
    "it shall be smaller"
)

_FREQUENCIES, _LONG, _SHORT = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)

_TAKEN = (
    "dimension_count", "freq_base", "scaling.type", "scaling.factor", "scaling.finetuned",
    "scaling.original_context_length", "scaling.attn_factor", "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
)  # fmt: skip
_NEUTRAL = {"scale_linear": (0, 1), "scaling.yarn_ext_factor": (-1, 1),
            "scaling.yarn_attn_factor": (1,), "scaling.yarn_log_multiplier": (0,),
            "scaling.alpha": (0, 1)}  # fmt: skip
"""Values that change nothing, of settings of the rotary embedding that are not served."""

_FACTORS = (
    "logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.clamp_kqv",
)  # fmt: skip
"""What the served architectures do not have."""

_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models. Only these scale scores by the width that a head would have without
``head_dim``, and no setting of the file says so."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    architecture: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A setting of the architecture."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> float | None:
        """A setting of the architecture that is a number; None: there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, int | float):
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} is {value!r}, and no number; "
                "copy the file again"
            )
        return value

    def refusal(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {what}; {_REMEDY}")

    def refused_key(self, key: str) -> UnsupportedModel:
        name = f"{self.architecture}.{key}"
        return self.refusal(f"{name} is {self.get(key)!r}, which is not served from GGUF")

    def factors(self, name: str) -> Tensor:
        return torch.tensor(self.tensors[name].data).float().flatten()


def open_gguf(path: Path) -> tuple[Any, str]:
    """The reader of a file, by the package gguf, and its architecture.

    Raises:
        ModelError: the file is damaged, or the package gguf is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            f"{path} needs the package gguf: pip install 'penstock-llm[gguf]'"
        ) from error
    try:
        reader = gguf.GGUFReader(path)
        return reader, str(reader.fields["general.architecture"].contents())
    except Exception as error:  # whatever a damaged header makes of the reader
        raise ModelError(f"{path} is damaged ({error}); copy it again") from error


def is_a_setting(name: str) -> bool:
    """Whether a tensor is no weight: :func:`complete_config` reads it, or it is redundant."""
    # Converters of old kept the inverse frequencies, which follow from the settings.
    return name in (_FREQUENCIES, _LONG, _SHORT) or name.endswith(".attn_rot_embd.weight")


def complete_config(config: Any, path: Path) -> None:
    """Put into ``config`` what transformers left in the file.

    Args:
        config: as transformers reads it from the file; changed in place.
        path: of the file.

    Raises:
        UnsupportedModel: a setting is not served; names it. Of architectures that are not served
            nothing is checked.
        ModelError: the file is damaged, a setting is no number, or the package gguf is missing.
    """
    reader, architecture = open_gguf(path)
    if architecture not in ARCHITECTURES:
        return
    values = {
        key: field.contents()
        for key, field in reader.fields.items()
        if key.startswith(f"{architecture}.")
    }
    file = _File(path, architecture, values, {t.name: t for t in reader.tensors})
    for key in _FACTORS:
        if file.get(key):
            raise file.refused_key(key)
    _set_attention(config, file)
    _set_rotary(config, file)


def _set_attention(config: Any, file: _File) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = file.number(key)
        if value and not hasattr(config, key):
            raise file.refused_key(key)
        if value:
            setattr(config, key, float(value))
    window = file.number("attention.sliding_window")
    if window and window < config.max_position_embeddings:
        if file.architecture not in ("gemma2", "gemma3", "phi3"):
            raise file.refused_key("attention.sliding_window")
        config.sliding_window = int(window)
    if file.architecture in _LARGEST_GEMMA:
        is_largest = config.num_hidden_layers == _LARGEST_GEMMA[file.architecture]
        without = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = without if is_largest else config.head_dim


def _set_rotary(config: Any, file: _File) -> None:
    changes = _scaling(config, file)
    turned, width = file.number("rope.dimension_count"), _head_width(config)
    if turned and turned != width:
        if file.architecture != "phi3":
            raise file.refused_key("rope.dimension_count")
        changes["partial_rotary_factor"] = turned / width
    prefix = f"{file.architecture}.rope."
    for key in (name.removeprefix(prefix) for name in file.values if name.startswith(prefix)):
        value = file.get(f"rope.{key}")
        if key == "freq_base_swa" and file.architecture == "gemma3":
            base = file.number("rope.freq_base_swa")
            config.rope_parameters["sliding_attention"]["rope_theta"] = base
        elif key == "dimension_count_swa" and value == width:
            continue
        elif key not in _TAKEN and value not in _NEUTRAL.get(key, ()):
            raise file.refused_key(f"rope.{key}")
    if not changes:
        return
    if "original_max_position_embeddings" in changes and file.architecture == "phi3":
        # Its configuration has this beside the parameters, and takes it from there.
        config.original_max_position_embeddings = changes["original_max_position_embeddings"]
    # Of Gemma 3 only the layers without a window are scaled.
    old = config.rope_parameters
    by_layer = "full_attention" in old
    config.rope_parameters = (
        {**old, "full_attention": {**old["full_attention"], **changes}}
        if by_layer
        else {**old, **changes}
    )
    config.standardize_rope_params()


def _scaling(config: Any, file: _File) -> dict[str, Any]:
    """What becomes of the rotary embedding's parameters; nothing where positions are as usual."""
    kind, factor = file.get("rope.scaling.type"), file.number("rope.scaling.factor") or 1.0
    if kind is None:  # which llama.cpp takes for linear
        kind = "none" if factor == 1 else "linear"
    original = file.number("rope.scaling.original_context_length")
    if _LONG in file.tensors or _SHORT in file.tensors:
        return _longrope(file, kind, original)
    if _FREQUENCIES in file.tensors:
        return _llama3(config, file, kind, original)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if file.architecture == "phi3" or kind not in ("linear", "yarn"):
        raise file.refused_key("rope.scaling.type")
    if file.number("rope.scaling.attn_factor") not in (None, 1):
        raise file.refused_key("rope.scaling.attn_factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if file.architecture == "gemma3" or original is None:
        missing = "without rope.scaling.original_context_length" if original is None else "here"
        raise file.refusal(f"rope.scaling.type is 'yarn', which {missing} is not served from GGUF")
    betas = {
        f"beta_{end}": value
        for end in ("fast", "slow")
        if (value := file.number(f"rope.scaling.yarn_beta_{end}")) is not None
    }
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        **betas,
    }


def _longrope(file: _File, kind: str, original: Any) -> dict[str, Any]:
    both = _LONG in file.tensors and _SHORT in file.tensors
    if file.architecture != "phi3" or kind not in ("none", "longrope") or not (both and original):
        raise file.refusal(
            f"it has {_LONG} or {_SHORT}, which are served of phi3 only, both together with "
            "phi3.rope.scaling.original_context_length"
        )
    factor = file.number("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "short_factor": file.factors(_SHORT).tolist(),
        "long_factor": file.factors(_LONG).tolist(),
        "original_max_position_embeddings": int(original),
        **({} if factor is None else {"attention_factor": factor}),
    }


def _llama3(config: Any, file: _File, kind: str, original: Any) -> dict[str, Any]:
    """The parameters of which llama.cpp's converter made the factors of the frequencies."""
    factors = file.factors(_FREQUENCIES)
    if bool((factors == 1).all()) and kind == "none":
        return {}
    made = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": int(original or 8192),
    }
    tried = copy.deepcopy(config)
    theta, width = tried.rope_parameters.get("rope_theta"), _head_width(config)
    if kind == "none" and theta is not None and len(factors) == width // 2:
        tried.rope_parameters = {**tried.rope_parameters, **made}
        found, _ = ROPE_INIT_FUNCTIONS["llama3"](tried, torch.device("cpu"))
        plain = 1 / theta ** (torch.arange(0, width, 2).float() / width)
        if torch.allclose(plain / found, factors, rtol=1e-3, atol=0):
            return made
    raise file.refusal(
        f"the factors in {_FREQUENCIES} are not those of Llama 3.1 to 3.3 (low_freq_factor 1, "
        f"high_freq_factor 4, over {made['original_max_position_embeddings']} tokens)"
    )


def _head_width(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)
