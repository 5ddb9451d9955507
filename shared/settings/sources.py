"""Where settings come from: the command line, the environment, a file, a profile, the defaults.

An unknown name is an error like a wrong value: otherwise a default would apply unnoticed. Every
error is one line: the source, the setting, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigurationError
from ..quoting import one_line
from ..redis.address import redact_url
from .profiles import PROFILES
from .tree import Settings

__all__ = ["CONFIG_VARIABLE", "environment_name", "load_settings", "setting_names"]

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
"""Environment variable that names the settings file; not itself a setting."""

_PREFIX = "PENSTOCK_"
_DEFAULT_FILE = "penstock.toml"
_MAX_MESSAGE = 3000

# Kubernetes sets such variables for a Service whose name begins with "penstock".
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it was found."""

    value: object
    source: str


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Build the settings from all sources.

    In order of priority: ``flags``; ``PENSTOCK_<SECTION>__<NAME>`` (an empty one counts as not
    set); ``REDIS_URL``; the file; the profile that ``worker.profile`` names; the defaults. The file
    is that of ``config`` or ``PENSTOCK_CONFIG``, or ``penstock.toml`` in the current directory if
    it exists.

    Args:
        flags: dotted names, such as ``redis.url``, with values from the command line; None values
            count as not given.
        config: a settings file in TOML, one table per section.
        environment: the variables to read; None takes the process's own.

    Returns:
        The validated settings.

    Raises:
        ConfigurationError: a file is missing or malformed, a name is unknown, or a value is of the
            wrong type or out of range.
    """
    if environment is None:
        environment = os.environ
    given: dict[str, _Given] = {}
    named = config or environment.get(CONFIG_VARIABLE)
    if named:
        given |= _from_file(Path(named))
    elif Path(_DEFAULT_FILE).is_file():
        given |= _from_file(Path(_DEFAULT_FILE))
    given |= _from_environment(environment)
    given |= _from_flags(flags or {})
    given = _from_profile(given) | given
    nested: dict[str, dict[str, object]] = {}
    for name, item in given.items():
        section, _, key = name.partition(".")
        nested.setdefault(section, {})[key] = item.value
    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, given)) from None


def setting_names() -> tuple[str, ...]:
    """Return the dotted names of all settings, in the order of the tree."""
    names = []
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        names += [f"{section}.{name}" for name in model.model_fields]
    return tuple(names)


def environment_name(name: str) -> str:
    """Return the environment variable of a setting: ``redis.url`` is ``PENSTOCK_REDIS__URL``."""
    return _PREFIX + name.replace(".", "__").upper()


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"settings file {path} is not valid TOML"
        raise ConfigurationError(f"{what}: {one_line(str(error), _MAX_MESSAGE)}") from None
    found: dict[str, _Given] = {}
    for section, table in content.items():
        if not isinstance(table, dict):
            sections = ", ".join(f"[{name}]" for name in Settings.model_fields)
            where = f"{one_line(section, 100)} in {path}"
            raise ConfigurationError(f"{where}: settings belong into one of {sections}")
        for key, value in table.items():
            name = f"{section}.{key}"
            _check_name(name, setting_names(), name, str(path))
            found[name] = _Given(value, str(path))
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    names = {environment_name(name): name for name in setting_names()}
    found: dict[str, _Given] = {}
    if environment.get("REDIS_URL"):
        found["redis.url"] = _Given(environment["REDIS_URL"], "REDIS_URL")
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in names and _is_from_kubernetes(variable, value):
            continue
        _check_name(variable, names, variable, "the environment")
        if value:
            found[names[variable]] = _Given(value, variable)
    return found


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    found = {}
    for name, value in flags.items():
        _check_name(name, setting_names(), name, "the command line")
        if value is not None:
            found[name] = _Given(value, "the command line")
    return found


def _from_profile(given: Mapping[str, _Given]) -> dict[str, _Given]:
    """The settings of the profile that is chosen; what is no profile, the tree refuses."""
    chosen = given.get("worker.profile")
    if chosen is None or not isinstance(chosen.value, str):
        return {}
    settings = PROFILES.get(chosen.value, {})
    source = f"the profile {chosen.value}"
    return {name: _Given(value, source) for name, value in settings.items()}


def _is_from_kubernetes(variable: str, value: str) -> bool:
    if not _KUBERNETES_NAME.search(variable):
        return False
    return "_SERVICE_" in variable or "_TCP" in variable or bool(_KUBERNETES_VALUE.match(value))


def _check_name(name: str, known: Iterable[str], shown: str, source: str) -> None:
    names = list(known)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "docs/settings.md lists them all"
    raise ConfigurationError(f"{source}: there is no setting {one_line(shown, 100)}; {hint}")


def _explain(error: ValidationError, given: Mapping[str, _Given]) -> str:
    """Turn pydantic's report into one line."""
    problems = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"][:2])
        message = _what_is_allowed(item["msg"])
        if name in given:
            problems.append(f"{name} = {_show(name, given[name])}: {message}")
        else:
            # A rule about several settings of a section; its message names them.
            sources = {g.source for n, g in given.items() if n.startswith(f"{name}.")}
            problems.append(f"{name} (from {', '.join(sorted(sources))}): {message}")
    return one_line("; ".join(problems), _MAX_MESSAGE)


def _show(name: str, item: _Given) -> str:
    value: Any = item.value
    if name == "redis.url" and isinstance(value, str):
        value = redact_url(value)
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return f"{shown} (from {item.source})"


def _what_is_allowed(message: str) -> str:
    text = message
    for start in ("Value error, ", "Input ", "String "):
        text = text.removeprefix(start)
    if text.startswith("could not parse value and unit"):
        return "should be a number of bytes, such as 536870912 or 512MiB"
    return text
