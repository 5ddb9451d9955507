"""Every setting of the engine that its configuration knows arrives there."""

from __future__ import annotations

import pytest

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine_process.engine_settings import engine_config
from penstock.shared.errors import ConfigurationError
from penstock.shared.settings import EngineSettings


def config_of(**settings: object) -> EngineConfig:
    return engine_config(
        EngineSettings.model_validate(settings),
        num_blocks=8,
        max_model_len=512,
        auto_batch_tokens=256,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 32),
        ("max_batch_tokens", 4096),
        ("max_sequences", 8),
        ("chunk_size", 128),
        ("prefix_cache", False),
        ("salt_by_tenant", True),
        ("policy", "edf"),
        ("max_overtake_s", 1.5),
        ("chunking", "off"),
        ("min_chunk_size", 4),
        ("preemption", "swap"),
    ],
)
def test_a_setting_of_the_same_name_arrives(name: str, value: object) -> None:
    assert getattr(config_of(), name) != value
    assert getattr(config_of(**{name: value}), name) == value


def test_settings_with_a_unit_and_those_that_are_auto() -> None:
    assert config_of(target_itl_ms=20.0).target_itl_s == 0.02
    assert (config_of().max_batch_tokens, config_of().chunk_size) == (256, 256)
    # Without chunks, the longest sequence and a token of every other one fit into a step.
    assert config_of(chunking="off").max_batch_tokens == 512 + 64
    assert config_of(max_sequences=300).max_batch_tokens == 300
    with pytest.raises(ConfigurationError, match="chunking is off"):
        config_of(chunking="off", max_batch_tokens=512)
