-- repair: look at one request that is in dl, and put right what a script cut short or a deleted key
-- left wrong. Included after requeue.lua. Returns true if there was something.
--
-- What must hold: a terminal request has no entry, no owner and is not in dl; a running one is in
-- own:<w> of a worker with a lease; a queued one has an entry that nobody has read, in a queue
-- that is served. (Counters are not repaired but recounted: see rebuild_counters.lua.)
local function repair(prefix, rid, now, max_blames, max_attempts, retention)
  local rec = read_record(prefix, rid)
  if not rec then
    end_orphan(prefix, rid, nil, nil, now, retention)
    return true
  end
  if rec.st == 'running' then
    local owned = attempt(nil, 'HEXISTS', prefix .. 'own:' .. rec.w, rid)
    if owned == 1 and redis.call('ZSCORE', prefix .. 'wl', rec.w) then return false end
    requeue(prefix, rid, rec, 0, now, max_blames, max_attempts, retention)
    return true
  end
  local record, log = prefix .. 'r:' .. rid, prefix .. 't:' .. rid
  if rec.st ~= 'queued' then
    local _, ended = log_position(log)
    if not ended then
      log_end(prefix, rid, rec.n, redis.call('HGET', record, 'end'), rec.inbox)
    end
    redis.call('PEXPIRE', record, retention)
    redis.call('PEXPIRE', log, retention)
    redis.call('HDEL', record, 'pay')
    if is_entry_of(rec.sk, rec.sid, rid) then drop_entry(rec.sk, rec.sid, rec.w) end
    if rec.w ~= '' then
      forget_consumer(rec.sk, rec.w)
      redis.call('HDEL', prefix .. 'own:' .. rec.w, rid)
    end
    note_ended(prefix, rid, now, retention)
    redis.call('ZREM', prefix .. 'dl', rid)
    return true
  end
  if redis.call('PTTL', record) == -1 then
    redis.call('PEXPIREAT', record, rec.dl + retention + ABANDONED_MS)
  end
  local fresh = rec.sk ~= prefix .. 'q:!:' .. rec.lane and rec.sk ~= prefix .. 'q:?'
  if fresh then join_lane(prefix, rec.lane, rec.ten) end
  if is_entry_of(rec.sk, rec.sid, rid) then
    local read = attempt('NOGROUP', 'XPENDING', rec.sk, GROUP, rec.sid, rec.sid, '1')
    if read and not read[1] then return false end
    drop_entry(rec.sk, rec.sid, read and read[1][2])
  end
  local entry = push_back(rec.sk, rid, rec)
  redis.call('HSET', record, 'sid', entry)
  return true
end
