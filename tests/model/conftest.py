"""Fixtures of the model tests: tiny checkpoints on disk, and models loaded from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model.families import save_family
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models only lose by more, and sums then do not depend on the machine's cores."""
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tiny checkpoint; made once, so tests must not change it."""
    folder = tmp_path_factory.mktemp("families")
    made: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = save_family(model_type, folder)
        return made[model_type]

    return get


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], LoadedModel]]:
    """A family's model as the worker loads it, in float32 on the CPU; loaded once."""
    models: dict[str, LoadedModel] = {}

    def get(model_type: str) -> LoadedModel:
        if model_type not in models:
            models[model_type] = load_model(checkpoint(model_type), device="cpu")
        return models[model_type]

    yield get
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def loaded_by_torch(
    checkpoint: Callable[[str], Path],
) -> Iterator[Callable[[str], LoadedModel]]:
    """The same, computed by torch though the native library could."""
    models: dict[str, LoadedModel] = {}

    def get(model_type: str) -> LoadedModel:
        if model_type not in models:
            models[model_type] = load_model(checkpoint(model_type), device="cpu", native="off")
        return models[model_type]

    yield get
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """The same checkpoint as transformers runs it: eager attention, float32; loaded once."""
    models: dict[str, Any] = {}

    def get(model_type: str) -> Any:
        if model_type not in models:
            models[model_type] = AutoModelForCausalLM.from_pretrained(
                checkpoint(model_type),
                attn_implementation="eager",
                dtype=torch.float32,
                local_files_only=True,
            ).eval()
        return models[model_type]

    return get
