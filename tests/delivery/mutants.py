"""Scripts with one guard taken out each, and the test that must notice.

A random storm does not see most of these: the two guards of `append` cover for each other almost
everywhere. So every guard has a directed test, and every directed test has its mutant.
"""

from __future__ import annotations

from delivery import (
    test_compaction,
    test_damage,
    test_door,
    test_ends,
    test_fairness,
    test_fingerprints,
    test_guards,
    test_inbox,
    test_lost_workers,
    test_readers,
    test_shares,
    test_tenant_shares,
    test_usage,
)
from delivery.mutation import Mutant, without_oom

FENCE = "if tonumber(v[2]) ~= epoch or v[4] ~= worker then return 2, tokens end"
LEASE = "redis.call('ZADD', PREFIX .. 'leases', now + lease_ms, worker)"
END_ANSWER = (
    "if reason == row[8] and last ~= '' and tokens == start + count then return 0, tokens end"
)

MUTANTS = (
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
    # one model: registration, streams that keep to theirs, streams whose model is gone
    Mutant(
        "any model registered", "if others[1] then return", "if false then return",
        test_fingerprints.test_another_model_is_refused_while_one_is_served, "register",
    ),
    Mutant(
        "gone models count as served", "'(' .. now, '+inf')", "'-inf', '+inf')",
        test_fingerprints.test_another_model_is_served_once_nobody_serves_the_old_one, "register",
    ),
    Mutant(
        "known models refused", "and not redis.call('ZSCORE', served, fingerprint)", "",
        test_fingerprints.test_a_rolling_change_has_both, "register",
    ),
    Mutant(
        "rolling change not asked for", "if rolling == '0' and", "if",
        test_fingerprints.test_a_rolling_change_has_both, "register",
    ),
    Mutant(
        "sweep says no model",
        "if fingerprint ~= '' then redis.call('ZADD', FINGERPRINTS, now + lease, fingerprint) end",
        "", test_fingerprints.test_every_sweep_renews_the_word_for_a_model, "sweep",
    ),
    Mutant(
        "streams continue on any model", "rec.fingerprint and rec.fingerprint ~= fingerprint then",
        "false then", test_fingerprints.test_a_stream_continues_on_its_own_model_alone, "claim",
    ),
    Mutant(
        "work without tokens kept to a model", "if rec.tokens > 0 and fingerprint ~= ''",
        "if fingerprint ~= ''",
        test_fingerprints.test_work_without_tokens_starts_anew_on_any_model, "claim",
    ),
    Mutant(
        "model not noted", "if fingerprint ~= '' then redis.call('HSET', record,",
        "if false then redis.call('HSET', record,",
        test_fingerprints.test_a_stream_continues_on_its_own_model_alone, "claim",
    ),
    Mutant(
        "own queue not read", "return {own_queue(name, fingerprint), PREFIX .. name}",
        "return {PREFIX .. name}",
        test_fingerprints.test_a_stream_continues_on_its_own_model_alone, "claim",
    ),
    Mutant(
        "suspects moved among the others", "rec.blames >= SUSPECT_FROM and 'suspects' or", "",
        test_fingerprints.test_suspects_keep_to_their_model_one_at_a_time, "claim",
    ),
    Mutant(
        "streams of a gone model wait on", "  guarded(end_streams_of, gone)\n", "",
        test_fingerprints.test_streams_of_a_model_that_is_gone_end_with_the_reason, "sweep",
    ),
    Mutant(
        "no time to return", "now - LEASES_TO_RETURN * lease", "now",
        test_fingerprints.test_a_model_has_ten_leases_to_return, "sweep",
    ),
    Mutant(
        "models not spared after an outage", "redis.call('ZADD', FINGERPRINTS, now, gone)", "",
        test_fingerprints.test_after_an_outage_a_model_has_ten_leases_again, "sweep",
    ),
    Mutant(
        "running streams ended with their model", "rec.state == 'queued' and rec.queue == queue",
        "rec.queue == queue",
        test_fingerprints.test_what_runs_is_not_ended_with_its_model, "sweep",
    ),
    Mutant(
        "orphans without bound", "if orphans >= MAX_ORPHANS then more = true break end", "",
        test_fingerprints.test_one_sweep_ends_a_bounded_number_of_them, "sweep",
    ),
    # submit: shares between tenants
    Mutant(
        "a tenant may hold everything", "held > 0 and held + add > most", "false",
        test_tenant_shares.test_a_flood_of_one_tenant_closes_the_door_for_no_other, "submit",
    ),
    Mutant(
        "batch may use all room", "if used + add > room then return '', room end", "",
        test_tenant_shares.test_batch_as_a_whole_leaves_room_for_urgent_lanes, "submit",
    ),
    Mutant(
        "lanes are equal at the door", "share * WEIGHT[lane] * (room - used)",
        "share * (room - used)",
        test_tenant_shares.test_a_flood_of_one_tenant_closes_the_door_for_no_other, "submit",
    ),
    Mutant(
        "an empty queue refuses what fits", "if share == 0 or used == 0 then", "if share == 0 then",
        test_tenant_shares.test_an_empty_queue_takes_whatever_fits, "submit",
    ),
    Mutant(
        "a newcomer pays for the others", "held > 0 and held + add > most", "held + add > most",
        test_tenant_shares.test_who_holds_nothing_may_use_the_rooms_rest, "submit",
    ),
    Mutant(
        "tokens of a tenant not counted",
        "redis.call('HINCRBY', counters, tokens_held, sign * cost)", "",
        test_tenant_shares.test_tokens_are_shared_too, "submit",
    ),
    Mutant(
        "bytes of a tenant not counted",
        "redis.call('HINCRBY', counters, bytes_held, sign * bytes)", "",
        test_tenant_shares.test_bytes_are_shared_too, "submit",
    ),
    Mutant(
        "what left still counts", "redis.call('HDEL', counters, held, tokens_held, bytes_held)",
        "redis.call('HDEL', counters, held)",
        test_tenant_shares.test_what_leaves_the_queue_frees_its_share, "claim",
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
    # submit and fairness at the door
    Mutant(
        "idle tenant keeps its old time", "'NX', floors[1] or 0, tenant)", "'NX', 0, tenant)",
        test_fairness.test_a_returning_tenant_can_not_claim_its_idle_time,
    ),
    Mutant(
        "idle lane keeps its old time", "'NX', floors[2] or 0, lane)", "'NX', 0, lane)",
        test_fairness.test_a_returning_lane_can_not_claim_its_idle_time,
    ),
    Mutant(
        "one more than the bound", "+ adds[i] > limit then", "+ adds[i] > limit + 1 then",
        test_door.test_the_bound_per_tenant_is_each_tenants_own,
    ),
    Mutant(
        "old log kept", "redis.call('DEL', record, log)", "redis.call('DEL', record)",
        test_door.test_an_id_is_free_again_after_its_retention,
    ),
    Mutant(
        "submit runs at maxmemory", "arguments(9, 19)\n", "arguments(9, 19)\nallow_oom()\n",
        test_door.test_submit_is_refused_at_maxmemory_and_stores_nothing,
    ),
    # finish
    Mutant(
        "end not acknowledged",
        "drop_entry(rec.queue, rec.entry, rec.worker)\n  redis.call('HINCRBY'",
        "redis.call('HINCRBY'", test_guards.test_end_acknowledges_and_deletes_the_entry,
    ),
    Mutant(
        "acknowledged and not deleted", "redis.call('XDEL', queue, entry)\n", "\n",
        test_guards.test_end_acknowledges_and_deletes_the_entry,
    ),
    Mutant(
        "dead consumers stay", "    forget_consumer(queue, worker)\n", "\n",
        test_lost_workers.test_dead_workers_leave_no_consumers_in_a_queue_that_never_empties,
    ),
    Mutant(
        "log never expires", "redis.call('PEXPIRE', log, retention)\n  redis.call('HDEL'",
        "redis.call('HDEL'", test_ends.test_records_and_logs_expire_with_their_retention,
    ),
    Mutant(
        "end not published", "redis.call('PUBLISH', PREFIX .. 'events:' .. id, event)", "",
        test_ends.test_ends_are_published,
    ),
    Mutant(
        "refund below what is served", "math.max(tonumber(score) + amount, floor or 0)",
        "tonumber(score) + amount", test_fairness.test_a_flood_of_overestimates_gives_no_head_start,
    ),
    Mutant(
        "estimates not settled", "if rec.claimed_at and spent ~= rec.cost then", "if false then",
        test_fairness.test_an_underestimate_is_paid_later,
    ),
    # the usage ledger
    Mutant(
        "ends not counted", "  add_usage(row, used or {})\n", "",
        test_usage.test_an_end_counts_what_its_event_says, "append",
    ),
    Mutant(
        "usage of events not read", "used = read_usage(event)", "used = {}",
        test_usage.test_an_end_counts_what_its_event_says, "append",
    ),
    Mutant(
        "usage of JSON events not read", "json and cjson.decode or cmsgpack.unpack",
        "cmsgpack.unpack", test_usage.test_a_json_end_counts_the_same, "append",
    ),
    Mutant(
        "a former owner's end counts", FENCE,
        "if tonumber(v[2]) ~= epoch or v[4] ~= worker then\n"
        "  add_usage(usage_row('normal', row[7], 'default', now), read_usage(last))\n"
        "  return 2, tokens end",
        test_usage.test_repeats_and_former_owners_count_nothing, "append",
    ),
    Mutant(
        "a repeated end counts",
        END_ANSWER, "if reason == row[8] and last ~= '' and tokens == start + count then\n"
        "  add_usage(usage_row('normal', row[7], 'default', now), read_usage(last))\n"
        "  return 0, tokens end",
        test_usage.test_repeats_and_former_owners_count_nothing, "append",
    ),
    Mutant(
        "usage not kept while it runs",
        "if used ~= '' then redis.call('HSET', record, 'usage', used) end", "",
        test_usage.test_an_end_without_its_worker_has_what_the_worker_told, "append",
    ),
    Mutant(
        "any text is usage", "if used ~= '' and not string.find(used, USED_PATTERN) then",
        "if false then", test_usage.test_usage_that_is_none_is_refused, "append",
    ),
    Mutant(
        "the next worker is told nothing", "now, log, rec.usage or '',", "now, log, '',",
        test_usage.test_the_next_worker_goes_on_with_what_was_told, "claim",
    ),
    Mutant(
        "wrong counts are added", "number >= 0 and", "",
        test_usage.test_no_count_of_an_event_is_worse_than_none, "append",
    ),
    Mutant(
        "rows without bound", "row.rows >= MAX_USAGE_ROWS", "false",
        test_usage.test_a_full_days_ledger_counts_new_tenants_together, "append",
    ),
    Mutant(
        "rows not counted", "'rows', row.rows + 1)", "'rows', row.rows)",
        test_usage.test_rows_are_counted, "append",
    ),
    Mutant(
        "sums are not added to", "(tonumber(sums[i]) or 0) + (i == 1", "(i == 1",
        test_usage.test_an_end_counts_what_its_event_says, "append",
    ),
    Mutant(
        "ledgers live for ever",
        "    redis.call('PEXPIREAT', row.key, row.ends + USAGE_RETENTION_MS)\n", "",
        test_usage.test_a_ledger_lives_as_long_as_a_sweep_says, "cancel",
    ),
    Mutant(
        "the setting is not heard", "keep_usage(now, usage_retention)\n", "",
        test_usage.test_a_ledger_lives_as_long_as_a_sweep_says, "sweep",
    ),
    Mutant(
        "lost records not counted",
        "add_usage(usage_row(values.lane, 'failed', values.tenant, now), {output_tokens = tokens})",
        "", test_usage.test_a_lost_record_counts_once,
    ),
    Mutant(
        "refusals not counted", "if row then add_usage(row, {}) end", "",
        test_usage.test_a_refused_entry_of_the_plain_door_counts_once, "refuse_ingress",
    ),
    # inboxes
    Mutant(
        "ends not in the inbox", "event, rec.inbox)", "event)",
        test_inbox.test_one_message_per_call_and_inbox, "append",
    ),
    Mutant(
        "a message for every event", "elseif not batches then", "elseif true then",
        test_inbox.test_one_message_per_call_and_inbox, "append",
    ),
    # cancel, for readers of a request whose time is over
    Mutant(
        "ended before its time", "if not how.reason then return {'early'} end", "",
        test_ends.test_readers_end_what_is_overdue_and_nothing_else, "cancel",
    ),
    # reader_heartbeat, and the sweep's part of it
    Mutant(
        "readers not looked for", "if now >= reprieve then", "if false then",
        test_readers.test_a_running_request_ends_when_its_reader_has_left, "sweep",
    ),
    Mutant(
        "no time after an outage", "> OUTAGE_MS then", "> 1e15 then",
        test_readers.test_after_an_outage_readers_get_time_to_come_back, "sweep",
    ),
    Mutant(
        "cancelled without having asked for it", "if rec and rec.on_disconnect == 'cancel' and",
        "if rec and", test_readers.test_others_go_on_without_readers, "sweep",
    ),
    Mutant(
        "cancelled although ended",
        "rec.on_disconnect == 'cancel' and is_alive(rec.state)", "rec.on_disconnect == 'cancel'",
        test_readers.test_a_request_that_finished_meanwhile_stays_finished, "sweep",
    ),
    Mutant(
        "reader's return not noted", "'GT', now + grace_ms", "'NX', now + grace_ms",
        test_readers.test_a_reader_that_comes_back_in_time, "reader_heartbeat",
    ),
    Mutant(
        "last word of any reader counts", "'GT', now + grace_ms", "now + grace_ms",
        test_readers.test_of_two_readers_the_one_that_stays_counts, "reader_heartbeat",
    ),
    Mutant(
        "ended requests attended", "v[2] == 'cancel' and is_alive(v[1])", "v[2] == 'cancel'",
        test_readers.test_a_request_that_finished_meanwhile_stays_finished,
        "reader_heartbeat",
    ),
    Mutant(
        "every request attended", "v and v[2] == 'cancel' and", "v and",
        test_readers.test_others_go_on_without_readers, "reader_heartbeat",
    ),
    Mutant(
        "readers outlive their request",
        "if rec.on_disconnect == 'cancel' then attempt(nil, 'ZREM'",
        "if false then attempt(nil, 'ZREM'",
        test_readers.test_a_request_that_finished_meanwhile_stays_finished, "append",
    ),
    Mutant(
        "readers forgotten by a redrive", "on_disconnect = f.on_disconnect", "on_disconnect = nil",
        test_readers.test_a_handover_and_a_redrive_keep_it, "redrive",
    ),
    without_oom("reader_heartbeat", test_readers.test_attend_runs_at_maxmemory),
    # compact, list_compactable
    Mutant(
        "log of a living request compacted",
        "not v[1] or is_alive(v[1]) then", "not v[1] then",
        test_compaction.test_a_request_that_has_not_ended_is_left, "compact",
    ),
    Mutant(
        "other entries than were read", "if redis.call('XLEN', log) ~= entries then",
        "if false then", test_compaction.test_a_log_that_is_not_what_was_read_is_left, "compact",
    ),
    Mutant(
        "other tokens than were read", "last[2][2][2] or '') ~= last_chunk then",
        "last_chunk) ~= last_chunk then",
        test_compaction.test_a_log_that_is_not_what_was_read_is_left, "compact",
    ),
    Mutant(
        "compact logs live for ever", "redis.pcall('PEXPIRE', new, left)", "1",
        test_compaction.test_a_compact_log_lives_as_long_as_the_log_would_have, "compact",
    ),
    Mutant(
        "compact log without its end", "chunk, 'end', last[2][2])", "chunk)",
        test_compaction.test_one_entry_with_the_chunk_and_the_end, "compact",
    ),
    Mutant(
        "told to everybody", "redis.call('ZADD', ended, 'XX', due + REDO_MS, id)", "",
        test_compaction.test_a_log_is_told_to_one_worker_for_a_time, "list_compactable",
    ),
    without_oom("compact", test_compaction.test_it_runs_at_maxmemory),
    without_oom("list_compactable", test_compaction.test_it_runs_at_maxmemory),
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
    without_oom("append", test_door.test_append_runs_at_maxmemory),
    without_oom("claim", test_door.test_claim_runs_at_maxmemory),
    without_oom("cancel", test_door.test_cancel_runs_at_maxmemory),
    without_oom("release", test_door.test_a_death_at_maxmemory_keeps_its_letter),
    without_oom("audit", test_door.test_audit_runs_at_maxmemory),
    without_oom("sweep", test_door.test_sweep_runs_at_maxmemory),
)  # fmt: skip
