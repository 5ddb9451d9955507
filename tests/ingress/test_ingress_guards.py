"""Commands denied in the middle of ingress scripts, and scripts with a guard taken out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from delivery.mutation import check_compiles
from delivery.test_denied_commands import deny, heal, refused
from ingress import test_admission, test_ingress_workers
from ingress.shard_ingress import ShardIngress
from redis.asyncio import Redis

from penstock.shared.scripts.script_loader import Script, load_script

INGRESS_SCRIPTS = ("accept_ingress", "poll_ingress", "refuse_ingress")


def commands(script: str) -> list[str]:
    """Every command that a script may run, less one that any script needs."""
    return sorted(name.lower() for name in load_script(script).header.commands - {"TIME"})


CASES = [(script, command) for script in INGRESS_SCRIPTS for command in commands(script)]


@pytest.mark.parametrize(("script", "command"), CASES)
async def test_a_denied_command(
    newest_ingress: ShardIngress, redis_url: str, script: str, command: str
) -> None:
    """Whatever is cut short where, the next look puts right, and nothing happens twice."""
    ingress = newest_ingress
    if script != "poll_ingress":
        await ingress.lease("w")
        await ingress.poll("w")
    await ingress.add(id="good", prompt="Hi", max_tokens=8)
    await ingress.add(id="bad", prompt="")
    await deny(ingress.shard, command)
    async with Redis.from_url(redis_url.replace("//", "//limited:pw@")) as limited:
        hindered = ShardIngress(limited)
        if script == "poll_ingress":
            await refused(hindered.poll("w"))
        else:
            good, bad = await ingress.read("w")
            await refused(hindered.resolve(good if script == "accept_ingress" else bad))
    for _ in range(2):
        await ingress.take_in()
    await heal(ingress.shard)
    assert await ingress.left() == (0, 0)
    await ingress.shard.check(stale_entries=True)
    worker = ingress.shard.worker("w")
    (claim,) = await worker.claim(9)
    assert claim.id == "good"
    await worker.send(worker.ending(claim, 0, 2))
    assert len(await ingress.shard.log("bad")) == 1
    await ingress.shard.check(ended=True, stale_entries=True)


Test = Callable[[ShardIngress], Awaitable[None]]

MUTANTS: dict[str, tuple[str, str, Test]] = {
    "acts on what is gone": (
        "if not entry_exists(ingress, entry) then",
        "if false then",
        test_ingress_workers.test_an_entry_is_acted_on_once,
    ),
    "refuses what is gone": (
        "if entry_exists(ingress, entry) then",
        "if true then",
        test_ingress_workers.test_an_entry_is_acted_on_once,
    ),
    "stays in the stream": (
        "attempt(nil, 'XDEL', ingress, entry)",
        "",
        test_admission.test_an_entry_becomes_what_submit_makes,
    ),
    "stays pending": (
        "attempt(nil, 'XACK', ingress, GROUP, entry)",
        "",
        test_admission.test_an_entry_becomes_what_submit_makes,
    ),
    "answers into another's request": (
        "if redis.call('EXISTS', PREFIX .. 'request:' .. free) == 0 then\n      redis.call('DEL'",
        "if true then\n      redis.call('DEL'",
        test_admission.test_an_id_in_use_is_not_touched_and_the_answer_is_elsewhere,
    ),
    "answers stay for ever": (
        "redis.call('PEXPIRE', PREFIX .. 'log:' .. free, retention)",
        "",
        test_admission.test_a_refusal_is_an_end_like_any_other,
    ),
    "time from when a worker looked": (
        "return math.min(now, tonumber(string.match(entry, '^%d+')))",
        "return now",
        test_admission.test_time_counts_from_when_the_entry_was_added,
    ),
    "time of its own making": (
        "return math.min(now, tonumber(string.match(entry, '^%d+')))",
        "return tonumber(string.match(entry, '^%d+'))",
        test_admission.test_time_counts_from_when_the_entry_was_added,
    ),
    "late ones are queued": (
        "if added + deadline_ms <= now and",
        "if false and",
        test_admission.test_a_name_from_the_dawn_of_time_is_late,
    ),
    "no bounds": (
        "whole('max_requests', max_requests)",
        "0",
        test_ingress_workers.test_bounds_are_never_exceeded_by_one_with_two_workers,
    ),
    "refused at maxmemory": (
        "\nallow_oom()\n",
        "\n",
        test_admission.test_it_runs_at_maxmemory,
    ),
    "the dead keep their entries": (
        "if reader ~= worker and not has_lease(reader) then",
        "if false then",
        test_ingress_workers.test_a_worker_killed_between_reading_and_acting,
    ),
    "the living are robbed": (
        "return lease and tonumber(lease) > now",
        "return false",
        test_ingress_workers.test_entries_of_a_living_worker_are_left_to_it,
    ),
    "lost replies stay lost": (
        "  take_over(tenant, ingress, worker)\n",
        "",
        test_ingress_workers.test_entries_of_a_living_worker_are_left_to_it,
    ),
    "the dead stay consumers": (
        "      forget_consumer(ingress, reader)\n",
        "",
        test_ingress_workers.test_a_worker_killed_between_reading_and_acting,
    ),
    "only what comes after the first worker": (
        "'CREATE', ingress, GROUP, '0', 'MKSTREAM'",
        "'CREATE', ingress, GROUP, '$', 'MKSTREAM'",
        test_admission.test_entries_added_before_there_was_a_worker,
    ),
    "trimmed entries stay pending": (
        "      redis.call('XACK', ingress, GROUP, row[1])\n",
        "",
        test_admission.test_entries_trimmed_after_they_were_read,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS, ids=lambda name: name.replace(" ", "-"))
async def test_mutant_is_noticed(newest_ingress: ShardIngress, name: str) -> None:
    old, new, test = MUTANTS[name]
    changed: list[Script] = []

    def load(script: str) -> Script:
        original = load_script(script)
        if script not in INGRESS_SCRIPTS or old not in original.source:
            return original
        assert original.source.count(old) == 1, f"{old!r} is not unique in {script}"
        source = original.source.replace(old, new)
        changed.append(Script.of(script, source))
        return changed[-1]

    for script in INGRESS_SCRIPTS:
        load(script)
    mutated = ShardIngress(newest_ingress.redis, load=load)
    assert changed, f"{old!r} occurs in no script any more"
    await check_compiles(newest_ingress.redis, changed)
    survived = False
    try:
        await test(mutated)
        survived = True
    except (Exception, pytest.fail.Exception):  # however the test fails, it has noticed
        pass
    finally:
        await newest_ingress.redis.config_set("maxmemory", 0)
    assert not survived, (
        f"{test.__name__} passes with {[script.name for script in changed]} changed"
    )
