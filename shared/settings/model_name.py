"""The name under which a model is served if nobody gave one."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigurationError, InvalidRequest
from ..keys import Keys
from .tree import Settings

__all__ = ["with_model_name"]


def with_model_name(settings: Settings) -> Settings:
    """Settings in which a checkpoint of one's own has its directory's name, unless one is set.

    Raises:
        ConfigurationError: the directory's name cannot be a model's.
    """
    if settings.model.path == "demo" or "model" in settings.queue.model_fields_set:
        return settings
    name = Path(settings.model.path).resolve().name
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
