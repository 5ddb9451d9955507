-- repair: look at one request that is in deadlines, and put right what a script cut short or a
-- deleted key left wrong. Included after requeue.lua. Returns true if there was something.
--
-- What must hold: a terminal request has no entry and no owner, and is not in deadlines. A running
-- one is in owned:<worker> of a worker with a lease. A queued one has an entry that no worker has
-- read, in a queue that is served. (Counters are not repaired but counted anew:
-- rebuild_counters.lua.)
local function repair(id, now, policy, retention)
  local rec = read_record(id)
  if not rec then
    end_orphan(id, nil, nil, now, retention)
    return true
  end
  if rec.state == 'running' then
    local owned = attempt(nil, 'HEXISTS', PREFIX .. 'owned:' .. rec.worker, id)
    if owned == 1 and redis.call('ZSCORE', PREFIX .. 'leases', rec.worker) then return false end
    requeue(id, rec, 0, now, policy, retention)
    return true
  end
  local record, log = PREFIX .. 'request:' .. id, PREFIX .. 'log:' .. id
  if rec.state ~= 'queued' then
    local _, ended = log_position(log)
    if not ended then
      log_end(id, rec.tokens, redis.call('HGET', record, 'end'), rec.inbox)
    end
    retention = retention_of(rec, retention)
    redis.call('PEXPIRE', record, retention)
    redis.call('PEXPIRE', log, retention)
    redis.call('HDEL', record, 'payload', 'usage')
    if read_entry(rec.queue, rec.entry, id) then drop_entry(rec.queue, rec.entry, rec.worker) end
    if rec.worker ~= '' then
      forget_consumer(rec.queue, rec.worker)
      redis.call('HDEL', PREFIX .. 'owned:' .. rec.worker, id)
    end
    note_ended(id, now, retention)
    redis.call('ZREM', PREFIX .. 'deadlines', id)
    return true
  end
  if redis.call('PTTL', record) == -1 then
    redis.call('PEXPIREAT', record, rec.deadline + retention + ABANDONED_MS)
  end
  local fresh = PREFIX .. 'queue:' .. rec.lane .. ':' .. rec.tenant
  if rec.queue == fresh then join_lane(rec.lane, rec.tenant) end
  if read_entry(rec.queue, rec.entry, id) then
    local read = attempt('NOGROUP', 'XPENDING', rec.queue, GROUP, rec.entry, rec.entry, '1')
    if read and not read[1] then return false end
    drop_entry(rec.queue, rec.entry, read and read[1][2])
  end
  local entry = push_back(rec.queue, id, rec)
  redis.call('HSET', record, 'entry', entry)
  return true
end
