"""A guard in Python taken out for a moment, wherever the guarded function was imported to."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol


class Change(Protocol):
    """What is done to the program."""

    def apply(self) -> Callable[[], None]:
        """Change it; returns what changes it back."""


@dataclass(frozen=True)
class Code:
    """Another text in place of one that occurs once in a function."""

    function: Any
    old: str
    new: str

    def apply(self) -> Callable[[], None]:
        function = getattr(self.function, "__func__", self.function)
        assert isinstance(function, FunctionType)
        source = textwrap.dedent(inspect.getsource(function))
        decorators = re.match(r"(@.*\n)*", source)
        assert decorators is not None
        source = source[decorators.end() :]
        assert source.count(self.old) == 1, f"{self.old!r} is not once in {function.__qualname__}"
        scope: dict[str, Any] = dict(function.__globals__)
        # Annotations are texts in every module; here too.
        text = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(text, "<mutant>", "exec"), scope)
        kept = function.__code__
        function.__code__ = scope[function.__name__].__code__

        def undo() -> None:
            function.__code__ = kept

        return undo


@dataclass(frozen=True)
class Bound:
    """Another value of a module's constant."""

    module: ModuleType
    name: str
    value: Any

    def apply(self) -> Callable[[], None]:
        kept = getattr(self.module, self.name)
        setattr(self.module, self.name, self.value)
        return lambda: setattr(self.module, self.name, kept)


@dataclass(frozen=True)
class Later:
    """A change to modules that take seconds to import: only its own test does."""

    make: Callable[[], Change]

    def apply(self) -> Callable[[], None]:
        return self.make().apply()


@dataclass(frozen=True)
class Mutant:
    """A program without one guard.

    Attributes:
        name: what is missing.
        change: how it is taken out.
        test: passes with the guard, and fails without.
    """

    name: str
    change: Change
    test: Callable[[], None]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The guard is out until this is left."""
        undo = self.change.apply()
        try:
            yield
        finally:
            undo()
