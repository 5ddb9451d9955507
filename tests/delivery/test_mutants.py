"""Every guard that is taken out of the scripts is missed by its directed test."""

from __future__ import annotations

import pytest
from delivery.fleet import Shard
from delivery.mutants import MUTANTS
from delivery.mutation import Mutant, check_compiles


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
async def test_mutant_is_noticed(newest_shard: Shard, mutant: Mutant) -> None:
    assert mutant.changes, f"{mutant.old!r} occurs in no script any more"
    await check_compiles(newest_shard.redis, [mutant.load(name) for name in mutant.changes])
    mutated = Shard(newest_shard.redis, load=mutant.load)
    survived = False
    try:
        await mutant.test(mutated)
        survived = True
    except (Exception, pytest.fail.Exception):  # however the test fails, it has noticed
        pass
    finally:
        await newest_shard.redis.config_set("maxmemory", 0)
    assert not survived, f"{mutant.test.__name__} passes with {mutant.changes} changed"
