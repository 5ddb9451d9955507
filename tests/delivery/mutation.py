"""A script with one guard taken out, and the test that must notice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from delivery.fleet import Shard
from redis.asyncio import Redis

from penstock.shared.scripts.script_loader import Script, load_script, script_names

# Guards of append that several mutants change.
FENCE = "if tonumber(v[2]) ~= epoch or v[4] ~= worker then return 2, tokens end"
END_ANSWER = (
    "if reason == row[8] and last ~= '' and tokens == start + count then return 0, tokens end"
)

DirectedTest = Callable[[Shard], Awaitable[None]]


@dataclass(frozen=True)
class Mutant:
    """A change to the source of one script, or of all that include the changed part.

    Attributes:
        name: what is missing.
        old: text that occurs exactly once in each script that is changed.
        new: what stands there instead.
        test: fails on the mutant, and passes on the script as it is.
        script: the one to change; None for all in which the text occurs.
    """

    name: str
    old: str
    new: str
    test: DirectedTest
    script: str | None = None

    def load(self, name: str) -> Script:
        """Load a script, changed if this mutant changes it."""
        script = load_script(name)
        if self.script not in (None, name) or self.old not in script.source:
            return script
        if script.source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is not unique in {name}.lua")
        source = script.source.replace(self.old, self.new)
        return Script.of(name, source)

    @property
    def changes(self) -> list[str]:
        """Names of the scripts it changes."""
        return [name for name in script_names() if self.load(name) != load_script(name)]


def without_oom(script: str, test: DirectedTest) -> Mutant:
    """The script is refused at maxmemory."""
    return Mutant(f"{script} without allow_oom", "\nallow_oom()\n", "\n", test, script)


async def check_compiles(redis: Redis, scripts: Sequence[Script]) -> None:
    """A script that is none fails every test, and shows nothing of a guard."""
    for script in scripts:
        assert await redis.script_load(script.source) == script.digest
