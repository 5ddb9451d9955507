"""Mutants of what requests, tenants, models, ends and readers rely on."""

from __future__ import annotations

from delivery import (
    test_admission,
    test_compaction,
    test_dead_letters,
    test_ends,
    test_fairness,
    test_fingerprints,
    test_guards,
    test_inbox,
    test_lost_workers,
    test_readers,
    test_tenant_shares,
    test_usage,
)
from delivery.mutation import END_ANSWER, FENCE, Mutant, without_oom

REQUEST_MUTANTS = (
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
    # redrive
    Mutant(
        "a redriven request's note is lost", ", note = f.note,", ",",
        test_dead_letters.test_a_redriven_request_keeps_its_note, "redrive",
    ),
    # submit: what waits is counted
    Mutant(
        "counters go down by -0", "cost, bytes = sign * cost + 0, sign * bytes + 0",
        "cost, bytes = sign * cost, sign * bytes",
        test_admission.test_a_request_of_no_cost_and_no_bytes,
    ),
    # submit: shares between tenants
    Mutant(
        "a tenant may hold everything", "held > 0 and held + add > most", "false",
        test_tenant_shares.test_a_flood_of_one_tenant_closes_the_queue_for_no_other, "submit",
    ),
    Mutant(
        "batch may use all room", "if used + add > room then return '', room end", "",
        test_tenant_shares.test_batch_as_a_whole_leaves_room_for_urgent_lanes, "submit",
    ),
    Mutant(
        "lanes are equal at submission", "share * WEIGHT[lane] * (room - used)",
        "share * (room - used)",
        test_tenant_shares.test_a_flood_of_one_tenant_closes_the_queue_for_no_other, "submit",
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
        "redis.call('HINCRBY', counters, tokens_held, cost)", "",
        test_tenant_shares.test_tokens_are_shared_too, "submit",
    ),
    Mutant(
        "bytes of a tenant not counted",
        "redis.call('HINCRBY', counters, bytes_held, bytes)", "",
        test_tenant_shares.test_bytes_are_shared_too, "submit",
    ),
    Mutant(
        "what left still counts", "redis.call('HDEL', counters, held, tokens_held, bytes_held)",
        "redis.call('HDEL', counters, held)",
        test_tenant_shares.test_what_leaves_the_queue_frees_its_share, "claim",
    ),
    # submit and fairness at submission
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
        test_admission.test_the_bound_per_tenant_is_each_tenants_own,
    ),
    Mutant(
        "old log kept", "redis.call('DEL', record, log)", "redis.call('DEL', record)",
        test_admission.test_an_id_is_free_again_after_its_retention,
    ),
    Mutant(
        "submit runs at maxmemory", "arguments(9, 19)\n", "arguments(9, 19)\nallow_oom()\n",
        test_admission.test_submit_is_refused_at_maxmemory_and_stores_nothing,
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
        test_usage.test_a_refused_entry_of_the_ingress_counts_once, "refuse_ingress",
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
        "ended before its time", "if not how.reason then return {'early', rec.state} end", "",
        test_ends.test_readers_end_what_is_overdue_and_nothing_else, "cancel",
    ),
    # reader_heartbeat, and the parts of cancel and the sweep in it
    Mutant(
        "ended under another reader", "'disconnected' and rec.shared then", "'no' then",
        test_readers.test_a_submitter_does_not_end_what_is_read_elsewhere, "cancel",
    ),
    Mutant(
        "ended by nobody who is read elsewhere", "reason == 'disconnected' and rec.shared",
        "rec.shared", test_readers.test_a_submitter_does_not_end_what_is_read_elsewhere, "cancel",
    ),
    Mutant(
        "every reader is another", "if (v[3] or '') ~= inbox then", "if true then",
        test_readers.test_a_submitter_ends_what_it_alone_reads, "reader_heartbeat",
    ),
    Mutant(
        "readers not looked for", "if now >= reprieve then", "if false then",
        test_readers.test_a_running_request_ends_when_its_reader_has_left, "sweep",
    ),
    Mutant(
        "no time after an outage", "> OUTAGE_MS then", "> 1e15 then",
        test_readers.test_after_an_outage_readers_get_time_to_come_back, "sweep",
    ),
    Mutant(
        "no time after a short outage", "elseif spare == 1 and", "elseif false and",
        test_readers.test_readers_get_time_after_a_worker_lost_redis, "sweep",
    ),
    Mutant(
        "who has left is spared for ever", "now - pause >= reprieve then", "true then",
        test_readers.test_readers_get_time_after_a_worker_lost_redis, "sweep",
    ),
    Mutant(
        "the next grace is not told", "local grace = following and", "local grace = false and",
        test_readers.test_a_sweep_tells_when_the_next_grace_ends, "sweep",
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
)  # fmt: skip
