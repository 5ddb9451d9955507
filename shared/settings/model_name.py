"""The name under which a model is served unless the settings give one."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigurationError, InvalidRequest
from ..keys import Keys
from .tree import Settings

__all__ = ["with_model_name"]


def with_model_name(settings: Settings) -> Settings:
    """Settings in which a checkpoint of one's own has its directory's name, unless one is set.

    A batcher has the name of its class.

    Raises:
        ConfigurationError: the directory's name cannot be a model's.
    """
    target = settings.batcher.target
    of_demo = settings.model.path == "demo" and target is None
    if of_demo or "model" in settings.queue.model_fields_set:
        return settings
    name = Path(settings.model.path).resolve().name
    if target is not None:
        name = target.rpartition(":")[2]
    try:
        Keys(name)
    except InvalidRequest as error:
        raise ConfigurationError(
            f"the model cannot be served under its directory's name: {error}; "
            "give another with --name"
        ) from None
    tree = settings.model_dump()
    tree["queue"]["model"] = name
    return Settings.model_validate(tree)
