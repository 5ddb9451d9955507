"""What the files of an encoder's checkpoint say of the way from a text to its answer.

A checkpoint of sentence-transformers lists its modules in ``modules.json``; one of transformers
alone has an architecture in ``config.json``. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.shared.errors import ModelError, UnsupportedModel
from penstock.shared.protocol.states import ModelKind

__all__ = ["DenseStep", "EncoderRecipe", "checkpoint_kind", "read_recipe"]

_MAX_FILE_BYTES = 1 << 20

_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_MODES = frozenset(_POOLING_FLAGS.values())
_ACTIVATIONS = frozenset({"GELU", "Identity", "ReLU", "Sigmoid", "Tanh"})
_HARMLESS_ARGUMENTS = frozenset(
    {"attn_implementation", "device_map", "dtype", "padding_side", "torch_dtype", "use_fast"}
)


@dataclass(frozen=True, slots=True)
class DenseStep:
    """A linear layer behind the pooling.

    Attributes:
        folder: where its weights lie.
        activation: name of the class in ``torch.nn``.
        bias: whether it has one.
    """

    folder: Path
    activation: str
    bias: bool


@dataclass(frozen=True, slots=True)
class EncoderRecipe:
    """The steps of an encoder.

    Attributes:
        kind: what it answers.
        pooling: how one vector is made of a text's token states; the results of several ways stand
            one behind the other. Only for embeddings, as are the next three.
        pools_prompt: whether the tokens of a prompt count in the pooling.
        dense: linear layers behind it.
        normalized: embeddings have length 1.
        prompts: texts to put before an input, by name.
        default_prompt: the one that is used unless another is asked for; empty for none.
        dimensions: how many numbers of an embedding are kept unless a request says so; None for
            all.
        max_tokens: of one input; None leaves it to tokenizer and model.
        lower_case: whether texts are written in lower case first.
        activation: what makes a score of a logit, a class in ``torch.nn``; None for the model's
            convention.
    """

    kind: ModelKind
    pooling: tuple[str, ...] = ("mean",)
    pools_prompt: bool = True
    dense: tuple[DenseStep, ...] = ()
    normalized: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: int | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    activation: str | None = None


def checkpoint_kind(folder: Path) -> ModelKind:
    """What the checkpoint in ``folder`` does with a request; it generates text unless it says more.

    Raises:
        ModelError: a file is malformed.
    """
    modules = _module_types(folder)
    if "Pooling" in modules:
        return ModelKind.EMBED
    config = _read(folder / "config.json")
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith("ForSequenceClassification"):
        return ModelKind.RERANK if _num_labels(config) == 1 else ModelKind.CLASSIFY
    if modules:
        raise UnsupportedModel(
            f"modules.json in {folder} lists {', '.join(modules)}; served are a Transformer with "
            "Pooling, or one with a classification head"
        )
    is_base = name.endswith("Model") and not name.endswith("LMHeadModel")
    embeds = is_base or name.endswith("ForMaskedLM")
    return ModelKind.EMBED if embeds else ModelKind.GENERATE


def read_recipe(folder: Path, kind: ModelKind | None = None) -> EncoderRecipe:
    """Read the files of a checkpoint.

    Args:
        folder: the checkpoint.
        kind: what it shall answer; None takes what the files say.

    Raises:
        ModelError: a file is malformed.
        UnsupportedModel: a step is not known here, and leaving it out would be silently wrong.
    """
    kind = checkpoint_kind(folder) if kind is None else kind
    if kind is ModelKind.GENERATE:
        raise UnsupportedModel(f"{folder} holds no encoder: its architecture generates text")
    steps = _Steps(folder)
    whole = _read(folder / "config_sentence_transformers.json")
    prompts = {
        str(name): text
        for name, text in _map(whole.get("prompts"), folder, "prompts").items()
        if isinstance(text, str)
    }
    default = prompts.get(str(whole.get("default_prompt_name")), "")
    if default and kind is not ModelKind.EMBED:
        raise UnsupportedModel(f"{folder} has a default prompt, which only embedders may have here")
    return EncoderRecipe(
        kind=kind,
        pooling=steps.pooling or (_default_pooling(folder),),
        pools_prompt=steps.pools_prompt,
        dense=tuple(steps.dense),
        normalized=steps.normalized,
        prompts=prompts,
        default_prompt=default,
        dimensions=_count(whole.get("truncate_dim")),
        activation=_activation_of(folder, whole),
        **_transformer_values(folder, bool(steps.names), kind),
    )


class _Steps:
    """The modules behind the transformer, in the order of ``modules.json``."""

    def __init__(self, folder: Path) -> None:
        self.names = _module_types(folder)
        self.pooling: tuple[str, ...] = ()
        self.pools_prompt = True
        self.dense: list[DenseStep] = []
        self.normalized = False
        for number, (name, path) in enumerate(_modules(folder)):
            config = _read(folder / path / "config.json") if path else {}
            if number == 0:
                if name != "Transformer" or path:
                    raise self._unknown(folder, name)
            elif name == "Pooling" and not self.pooling:
                self.pooling = _pooling_modes(folder, config)
                self.pools_prompt = config.get("include_prompt", True) is not False
            elif name == "Dense" and self.pooling and not self.normalized:
                self.dense.append(_dense(folder / path, config))
            elif name == "Normalize" and self.pooling:
                self.normalized = True
            elif name != "Dropout":  # which does nothing once a model is trained
                raise self._unknown(folder, name)

    @staticmethod
    def _unknown(folder: Path, name: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"modules.json in {folder} has {name!r} where it is not served; known is Transformer "
            "in the checkpoint's own folder, then Pooling, Dense, Normalize"
        )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Type, without its package, and folder of each module; empty without ``modules.json``."""
    entries = _load(folder / "modules.json", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _malformed(folder / "modules.json", "a list of modules")
    found = []
    for entry in entries:
        path = entry.get("path") or ""
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise _malformed(folder / "modules.json", "paths inside the checkpoint")
        found.append((str(entry.get("type")).rpartition(".")[2], path))
    return found


def _module_types(folder: Path) -> list[str]:
    return [name for name, _ in _modules(folder)]


def _pooling_modes(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = (given,) if isinstance(given, str) else tuple(given)
    for mode in modes:
        if mode not in _POOLING_MODES:
            raise UnsupportedModel(
                f"{folder} asks for the pooling {mode!r}; served are "
                f"{', '.join(sorted(_POOLING_MODES))}"
            )
    return modes


def _dense(folder: Path, config: Mapping[str, Any]) -> DenseStep:
    source = config.get("module_input_name", "sentence_embedding")
    target = config.get("module_output_name") or source
    if {source, target} != {"sentence_embedding"} or config.get("use_residual"):
        raise UnsupportedModel(f"the layer in {folder} works on more than the embedding")
    path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return DenseStep(folder, _activation(path), config.get("bias", True) is not False)


def _activation(path: str) -> str:
    name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"the activation function {path[:100]!r} is not served; known are "
            f"{', '.join(sorted(_ACTIVATIONS))} of torch.nn"
        )
    return name


def _activation_of(folder: Path, whole: Mapping[str, Any]) -> str | None:
    """The activation function of a cross-encoder, by the names that it has had."""
    config = _read(folder / "config.json")
    newer = _map(config.get("sentence_transformers"), folder, "sentence_transformers")
    for path in (
        whole.get("activation_fn"),
        newer.get("activation_fn"),
        config.get("sbert_ce_default_activation_function"),
    ):
        if path is not None:
            return _activation(str(path))
    return None


def _transformer_values(folder: Path, is_listed: bool, kind: ModelKind) -> dict[str, Any]:
    """What the file of the first module says."""
    found = [folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()]
    if not found or not is_listed:
        return {}
    config = _read(found[0])
    task = config.get("transformer_task", "feature-extraction")
    allowed = "feature-extraction" if kind is ModelKind.EMBED else "sequence-classification"
    if "transformer_task" in config and task != allowed:
        raise UnsupportedModel(f"{found[0]} names the task {task!r}; for {kind} it is {allowed}")
    text = _map(config.get("modality_config"), folder, "modality_config").get("text")
    if text is not None and (
        not isinstance(text, dict)
        or text.get("method") != "forward"
        or text.get("method_output_name") not in ("last_hidden_state", "logits")
    ):
        raise UnsupportedModel(f"{found[0]} reads the model in another way than by its last state")
    for name in config:
        if name.endswith(("_args", "_kwargs")):
            unknown = set(_map(config[name], folder, name)) - _HARMLESS_ARGUMENTS
            if unknown:
                raise UnsupportedModel(f"{found[0]}: {name}.{min(unknown)} is not served")
    if config.get("query_expansion"):
        raise UnsupportedModel(f"{found[0]}: query_expansion is not served")
    return {
        "max_tokens": _count(config.get("max_seq_length")),
        "lower_case": config.get("do_lower_case") is True,
    }


def _default_pooling(folder: Path) -> str:
    """As sentence-transformers has it: the last token for what was made to generate text."""
    config = _read(folder / "config.json")
    architectures = config.get("architectures") or [""]
    is_causal = str(architectures[0]).endswith("ForCausalLM") and config.get("is_causal", True)
    return "lasttoken" if is_causal else "mean"


def _num_labels(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    if isinstance(labels, dict):
        return len(labels)
    return _count(config.get("num_labels")) or 2


def _count(value: object) -> int | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if valid else None  # type: ignore[return-value]


def _map(value: object, folder: Path, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _malformed(folder, f"an object as {name}")
    return value


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    value = _load(path, {})
    if not isinstance(value, dict):
        raise _malformed(path, "a JSON object")
    return value


def _load(path: Path, default: object) -> Any:
    if not path.is_file():
        return default
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise _malformed(path, f"at most {_MAX_FILE_BYTES} bytes")
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _malformed(path, "JSON") from error


def _malformed(path: Path, allowed: str) -> ModelError:
    return ModelError(f"{path} is malformed: expected {allowed}; copy the checkpoint again")
