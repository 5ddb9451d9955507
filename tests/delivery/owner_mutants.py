"""Mutants of the scripts by which workers own requests: append, claim, release, sweep."""

from __future__ import annotations

from delivery import (
    test_admission,
    test_damage,
    test_ends,
    test_fairness,
    test_guards,
    test_lost_workers,
    test_readers,
    test_shares,
)
from delivery.mutation import END_ANSWER, FENCE, Mutant, without_oom

LEASE = "redis.call('ZADD', PREFIX .. 'leases', now + lease_ms, worker)"

OWNER_MUTANTS = (
    # append: the two guards, and what makes its repeat harmless
    Mutant(
        "epoch not compared", FENCE, "if v[4] ~= worker then return 2, tokens end",
        test_guards.test_epoch_fences_a_worker_that_claimed_its_own_request_again,
    ),
    Mutant(
        "owner not compared", FENCE, "if tonumber(v[2]) ~= epoch then return 2, tokens end",
        test_guards.test_owner_is_compared_too,
    ),
    Mutant(
        "no fence at all", FENCE, "",
        test_guards.test_zombie_is_fenced_in_its_successors_prefill,
    ),
    Mutant(
        "state not looked at", "if v[1] ~= 'running' then", "if false then",
        test_guards.test_terminal_state_fences_its_own_owner, "append",
    ),
    Mutant(
        "index of chunks not compared", "if tokens ~= start then return 3, tokens end", "",
        test_guards.test_index_refuses_gap_overlap_and_early_end,
    ),
    Mutant(
        "index of ends not compared", "elseif tokens ~= start + count then", "elseif false then",
        test_guards.test_index_refuses_gap_overlap_and_early_end,
    ),
    Mutant(
        "repeated chunk refused", "if count > 0 and tokens ~= start + count then",
        "if count > 0 then",
        test_guards.test_repeat_after_a_lost_reply_changes_nothing,
    ),
    Mutant(
        "repeated end refused", END_ANSWER, "",
        test_guards.test_repeat_of_a_bare_end_changes_nothing,
    ),
    Mutant(
        "any end taken for the repeat", END_ANSWER, END_ANSWER.replace("reason == row[8]", "true"),
        test_guards.test_repeat_of_a_bare_end_changes_nothing,
    ),
    Mutant(
        "append renews no lease", LEASE, "",
        test_guards.test_every_step_renews_the_lease, "append",
    ),
    Mutant(
        "lost record not ended",
        "if claim then end_orphan(", "if false then end_orphan(",
        test_damage.test_deleted_record_of_a_running_request, "append",
    ),
    Mutant(
        "one item's error is the call's", "local ran, status, tokens = pcall(write, i, items[i])",
        "local ran, status, tokens = true, write(i, items[i])",
        test_damage.test_malformed_item_hurts_no_other,
    ),
    # claim
    Mutant(
        "claim renews no lease", LEASE, "",
        test_guards.test_every_step_renews_the_lease, "claim",
    ),
    Mutant(
        "acknowledged with the claim",
        "if not rec.claimed_at and rec.queue_deadline > 0 then\n",
        "drop_entry(queue, entry, worker)\n"
        "  if not rec.claimed_at and rec.queue_deadline > 0 then\n",
        test_guards.test_end_acknowledges_and_deletes_the_entry, "claim",
    ),
    Mutant(
        "past deadline handed out", "if rec.deadline <= now then return", "if false then return",
        test_ends.test_claim_hands_out_nothing_past_its_deadline, "claim",
    ),
    Mutant(
        "time in the queue not compared", "if waits and rec.queue_deadline <= now then",
        "if false then", test_ends.test_claim_hands_out_nothing_past_its_deadline, "claim",
    ),
    Mutant(
        "time in the queue counts on", "local waits = not rec.claimed_at and", "local waits =",
        test_ends.test_time_in_the_queue_counts_until_the_first_claim_only, "claim",
    ),
    Mutant(
        "lost log continued",
        "if not log or #log == 0 then return log, log and rec.tokens == 0 end",
        "if not log or #log == 0 then return log, true end",
        test_damage.test_log_lost_before_a_continuation, "claim",
    ),
    Mutant(
        "all suspects at once", "seeks_suspect = false\n", "\n",
        test_lost_workers.test_suspects_are_handed_out_one_at_a_time, "claim",
    ),
    Mutant(
        "equal lanes by name", "(row_time == time and row_weight > weight)", "false",
        test_fairness.test_the_most_urgent_lane_goes_first_from_a_standstill, "claim",
    ),
    Mutant(
        "continued work of any lane", "WEIGHT[lane] >= least_weight and wants_more()",
        "wants_more()", test_fairness.test_a_full_worker_may_ask_for_more_urgent_work_alone,
        "claim",
    ),
    Mutant(
        "displacing without bound", "lane_time <= time + MAX_AHEAD", "true",
        test_fairness.test_a_flood_of_urgent_work_displaces_others_up_to_its_share, "claim",
    ),
    Mutant(
        "what runs waits, too", "elseif has_fresh(", "elseif true or has_fresh(",
        test_fairness.test_what_runs_and_what_is_gone_is_no_reason_to_wait, "claim",
    ),
    Mutant(
        "lanes pay without their weight", "lane_time + cost / weight", "lane_time + cost",
        test_fairness.test_lanes_share_8_4_1, "claim",
    ),
    Mutant(
        "tenants pay by request", "tonumber(first[2]) + cost", "tonumber(first[2]) + 1",
        test_fairness.test_tenants_share_by_tokens_and_not_by_requests, "claim",
    ),
    Mutant(
        "no share", "math.min(want, share())", "want",
        test_shares.test_a_burst_is_spread_over_all_workers, "claim",
    ),
    Mutant(
        "shares of the dead", "'(' .. now, '+inf')", "'-inf', '+inf')",
        test_shares.test_a_lone_worker_takes_all, "claim",
    ),
    Mutant(
        "share of all lanes", "    if weight >= least_weight then", "    if true then",
        test_shares.test_a_claim_of_urgent_work_shares_that_alone, "claim",
    ),
    Mutant(
        "no more is told", "more and 1 or 0", "0",
        test_shares.test_a_burst_is_spread_over_all_workers, "claim",
    ),
    Mutant(
        "no bell for another look",
        "if turns >= MAX_TURNS and #claims == 0 then wake_workers() end", "",
        test_fairness.test_a_thousand_idle_tenants_hide_nobody, "claim",
    ),
    Mutant(
        "virtual time as text", "redis.call('HSET', VIRTUAL_TIME, 'lanes', lane_time)",
        "redis.call('HSET', VIRTUAL_TIME, 'lanes', tostring(lane_time))",
        test_fairness.test_virtual_times_keep_their_digits, "claim",
    ),
    # release, requeue, sweep
    Mutant(
        "no audit", "return known[id] ~= string.match(claim, '^%d+') end", "return false end",
        test_guards.test_audit_gives_back_a_claim_whose_reply_was_lost, "audit",
    ),
    Mutant(
        "audit by id alone", "return known[id] ~= string.match(claim, '^%d+') end",
        "return not known[id] end",
        test_guards.test_audit_gives_back_a_lost_claim_of_what_the_worker_owned_before, "audit",
    ),
    Mutant(
        "audit blames", "is_unknown, 0,", "is_unknown, 1,",
        test_guards.test_audit_gives_back_a_claim_whose_reply_was_lost, "audit",
    ),
    Mutant(
        "all is released where some were named", "mode == 'all' or named[id] == true", "true",
        test_lost_workers.test_release_of_some_and_of_all_but_some, "release",
    ),
    Mutant(
        "lease not forgotten", "redis.call('ZREM', PREFIX .. 'leases', worker)\nend", "end",
        test_lost_workers.test_release_of_some_and_of_all_but_some, "release",
    ),
    Mutant(
        "dead workers not looked for", "redis.call('ZRANGEBYSCORE', LEASES, '-inf', now,",
        "redis.call('ZRANGEBYSCORE', LEASES, '-inf', -1,",
        test_lost_workers.test_a_sweep_of_a_big_worker_is_bounded_and_goes_on, "sweep",
    ),
    Mutant(
        "the living reaped after an outage", "if pause > LEASE_OUTAGE * lease then",
        "if false then",
        test_lost_workers.test_after_an_outage_only_those_that_stay_silent_are_reaped, "sweep",
    ),
    Mutant(
        "the dead spared again and again", "'(' .. spared, now)) do", "'-inf', now)) do",
        test_lost_workers.test_outage_upon_outage_spares_the_dead_once, "sweep",
    ),
    Mutant(
        "every lease goes on", "if pause > LEASE_OUTAGE * lease then", "if true then",
        test_lost_workers.test_a_pause_shorter_than_a_lease_spares_nobody, "sweep",
    ),
    Mutant(
        "deadlines not looked for", "redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now,",
        "redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', -1,",
        test_ends.test_a_sweep_is_bounded_and_the_next_goes_on, "sweep",
    ),
    Mutant(
        "no more is told of deadlines", "if #due == MAX_EXPIRED then", "if false then",
        test_ends.test_a_sweep_is_bounded_and_the_next_goes_on, "sweep",
    ),
    Mutant(
        "no more is told of readers", "if #lapsed == MAX_ABANDONED then", "if false then",
        test_readers.test_a_sweep_cancels_boundedly_and_the_next_goes_on, "sweep",
    ),
    Mutant(
        "no more is told of dead workers", "if #dead == MAX_WORKERS then", "if false then",
        test_lost_workers.test_a_sweep_of_many_workers_is_bounded_and_goes_on, "sweep",
    ),
    Mutant(
        "no more is told of a big worker", "  if unfinished then\n    more = true\n",
        "  if unfinished then\n",
        test_lost_workers.test_a_sweep_of_a_big_worker_is_bounded_and_goes_on, "sweep",
    ),
    Mutant(
        "nothing repaired",
        "\n  if guarded(repair, ", "\n  if false and guarded(repair, ",
        test_damage.test_deleted_ownership_gives_the_request_to_others, "sweep",
    ),
    Mutant(
        "no suspects", "local SUSPECT_FROM = 2", "local SUSPECT_FROM = 99",
        test_lost_workers.test_suspects_are_handed_out_one_at_a_time,
    ),
    Mutant(
        "suspect at once", "local SUSPECT_FROM = 2", "local SUSPECT_FROM = 1",
        test_lost_workers.test_one_crash_makes_no_suspect_of_what_waited_there,
    ),
    Mutant(
        "blame in spite of progress", "if loss == 1 and rec.tokens == rec.claimed_tokens then",
        "if loss == 1 then",
        test_lost_workers.test_progress_clears_of_blame,
    ),
    Mutant(
        "a drain is counted", "if loss > 0 then deaths", "if loss >= 0 then deaths",
        test_lost_workers.test_draining_is_nobodys_fault,
    ),
    Mutant(
        "a kill is not counted", "if loss > 0 then deaths", "if loss == 1 then deaths",
        test_lost_workers.test_a_request_whose_workers_are_killed_ends_at_the_cap,
    ),
    Mutant(
        "blame for a kill", "if loss == 1 and rec.tokens", "if loss > 0 and rec.tokens",
        test_lost_workers.test_a_request_whose_workers_are_killed_ends_at_the_cap,
    ),
    Mutant(
        "blame for a drain", "if loss == 1 and rec.tokens", "if loss >= 0 and rec.tokens",
        test_lost_workers.test_draining_is_nobodys_fault,
    ),
    Mutant(
        "poison never ends", "if blames >= policy.max_blames then", "if false then",
        test_lost_workers.test_poison_ends_dead_and_bystanders_do_not,
    ),
    Mutant(
        "attempts without end", "elseif deaths >= policy.max_attempts then", "elseif false then",
        test_lost_workers.test_progress_with_every_crash_ends_at_the_cap,
    ),
    Mutant(
        "redrive over a living request", "if state and state ~= 'dead' then", "if false then",
        test_lost_workers.test_redrive_of_what_is_not_there_or_in_use, "redrive",
    ),
    without_oom("append", test_admission.test_append_runs_at_maxmemory),
    without_oom("claim", test_admission.test_claim_runs_at_maxmemory),
    without_oom("cancel", test_admission.test_cancel_runs_at_maxmemory),
    without_oom("release", test_admission.test_a_death_at_maxmemory_keeps_its_letter),
    without_oom("audit", test_admission.test_audit_runs_at_maxmemory),
    without_oom("sweep", test_admission.test_sweep_runs_at_maxmemory),
)  # fmt: skip
