--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/repair.lua
-- sweep: what time alone must bring about. Any worker may run it at any time.
--
-- Requests past their deadline end `expired`. Requests that asked to end with their last reader,
-- and that all readers have left, end `cancelled`. Requests of workers whose lease ended go back to
-- the queues. Streams of a model that no worker serves any more end `failed`. And the sweep
-- repairs, some requests in turn, what a script cut short or a deleted key left wrong. Bounded per
-- call, so that it never holds the server.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   deadlines               zset
--   leases                  zset
--   continued:critical      stream
--   continued:normal        stream
--   continued:batch         stream
--   suspects                stream
--   counters                hash
--   dead_letters            stream
--   bell                    stream
--   virtual_time            hash
--   readers                 zset
--   sweep                   hash    what this sweep leaves for the next one
--   fingerprints            zset    models by the time when the last worker's word for it ends
-- More keys, found while running: owned:<worker>, continued:<lane>:<fingerprint>,
-- suspects:<fingerprint>, usage:<day>, and request:<id>, log:<id> and the queue of each request that
-- is swept
-- ARGV
--   max_blames              whole
--   max_attempts            whole
--   retention_ms            whole
--   lease_ms                whole   the lease of the worker that sweeps
--   fingerprint             text    of its model; empty: it serves none
--   usage_retention_ms      whole   how long a day's usage ledger is kept after the day
--   spare_readers           whole   1: the worker that sweeps has just lost Redis, and so may readers
-- Reply {expired, requests taken from dead workers, dead workers, repaired, failed, last error,
--        cancelled because their readers left, 1 if a bound ended it: sweep again,
--        failed because nobody serves their model any more,
--        ms until the next reader's grace may end, 0 if no request ends with its reader}
local max_blames, max_attempts, retention, lease, fingerprint, usage_retention, spare =
  arguments(13, 7)
local policy = {
  max_blames = whole('max_blames', max_blames), max_attempts = whole('max_attempts', max_attempts),
}
retention, lease = whole('retention_ms', retention), whole('lease_ms', lease)
usage_retention = whole('usage_retention_ms', usage_retention)
spare = whole('spare_readers', spare)
local DEADLINES, LEASES, READERS = PREFIX .. 'deadlines', PREFIX .. 'leases', PREFIX .. 'readers'
local FINGERPRINTS = PREFIX .. 'fingerprints'
local MAX_EXPIRED, MAX_ABANDONED, MAX_WORKERS, MAX_REAPED, MAX_REPAIRED = 64, 64, 4, 128, 32
local RETRY_MS = 100
-- Sweeps come at least every second. A longer pause is an outage of the server or of all workers.
-- Readers could not say that they are there, so they get time to do so.
local OUTAGE_MS, REPRIEVE_MS = 3000, 15000
-- A shorter outage shows in a worker's lost connection alone. Connections that break all the time
-- must not spare for ever those who have left, so a sweep without reprieve lies in between.
local SHORT_REPRIEVE_MS = 3000
-- Leases are renewed every third of a lease at least, and swept no later than two thirds of one
-- after the last sweep. A longer pause is an outage, in which leases of living workers may have
-- ended, too.
local LEASE_OUTAGE = 0.75
-- So many leases after the last word for a model its streams end. Its workers may be restarting.
local LEASES_TO_RETURN = 10
local MAX_ORPHANS = 64
allow_oom()
local now = now_ms()

local failed, why, more = 0, '', false

-- An error with one request must not stop the others. Returns nil if the work failed.
local function guarded(work, ...)
  local ran, result = pcall(work, ...)
  if ran then return result end
  failed = failed + 1
  why = type(result) == 'table' and result.err or tostring(result)
  return nil
end

local function expire(id)
  local rec = read_record(id)
  if not rec or not is_alive(rec.state) then
    repair(id, now, policy, retention)
    return false
  end
  local reason = overdue(rec, now)
  if not reason then
    local waits = not rec.claimed_at and rec.queue_deadline > 0
    redis.call('ZADD', DEADLINES,
      waits and math.min(rec.queue_deadline, rec.deadline) or rec.deadline, id)
    return false
  end
  finish(id, rec, {state = 'expired', reason = reason}, now, retention)
  return true
end

local expired = 0
local due = redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', 0, MAX_EXPIRED)
if #due == MAX_EXPIRED then more = true end
for _, id in ipairs(due) do
  local done = guarded(expire, id)
  if done then expired = expired + 1 end
  -- A failed one is tried again later, or it would keep those behind it waiting.
  if done == nil then redis.call('ZADD', DEADLINES, 'XX', now + RETRY_MS, id) end
end

-- A request whose last reader's grace has ended.
local function cancel_abandoned(id)
  local rec = read_record(id)
  if rec and rec.on_disconnect == 'cancel' and is_alive(rec.state) then
    finish(id, rec, {state = 'cancelled', reason = 'disconnected'}, now, retention)
    return true
  end
  redis.call('ZREM', READERS, id)
  return false
end

local times = redis.call('HMGET', PREFIX .. 'sweep', 'cursor', 'swept_at', 'readers_spared_until',
  'leases_spared_until')
local pause = now - (tonumber(times[2]) or now)
local reprieve = tonumber(times[3]) or 0
if pause > OUTAGE_MS then
  reprieve = now + REPRIEVE_MS
elseif spare == 1 and now - pause >= reprieve then
  reprieve = now + SHORT_REPRIEVE_MS
end
local abandoned = 0
if now >= reprieve then
  local lapsed = attempt(nil, 'ZRANGEBYSCORE', READERS, '-inf', now, 'LIMIT', 0, MAX_ABANDONED)
    or {}
  if #lapsed == MAX_ABANDONED then more = true end
  for _, id in ipairs(lapsed) do
    local done = guarded(cancel_abandoned, id)
    if done then abandoned = abandoned + 1 end
    if done == nil then redis.call('ZADD', READERS, 'XX', now + RETRY_MS, id) end
  end
end

-- After an outage every lease that ended in it goes on for as long as living workers need to renew
-- theirs: it does not show yet which workers are dead. Once only: a lease that was spared and not
-- renewed since, ends.
local spared = tonumber(times[4]) or 0
if pause > LEASE_OUTAGE * lease then
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '(' .. spared, now)) do
    redis.call('ZADD', LEASES, now + lease, worker)
  end
  spared = now + lease
  -- The same for models: the wait for their workers begins anew.
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', FINGERPRINTS, '-inf', now)) do
    redis.call('ZADD', FINGERPRINTS, now, gone)
  end
end

local function reap(worker, owned, id, claim)
  local rec = read_record(id)
  if not rec then
    end_orphan(id, worker, claim, now, retention)
  elseif rec.state == 'running' and rec.worker == worker then
    requeue(id, rec, 1, now, policy, retention)
    return true
  else
    redis.call('HDEL', owned, id)
  end
  return false
end

local reaped, workers = 0, 0
local dead = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, MAX_WORKERS)
if #dead == MAX_WORKERS then more = true end
for _, worker in ipairs(dead) do
  local owned = PREFIX .. 'owned:' .. worker
  local claims = attempt(nil, 'HGETALL', owned) or {}
  local unfinished = false
  for i = 1, #claims, 2 do
    if reaped >= MAX_REAPED then unfinished = true break end
    if guarded(reap, worker, owned, claims[i], claims[i + 1]) then reaped = reaped + 1 end
  end
  -- The lease goes last: the next sweep takes up one that was cut short.
  if unfinished then
    more = true
  else
    redis.call('DEL', owned)
    redis.call('ZREM', LEASES, worker)
    workers = workers + 1
  end
end

-- Models without a worker: their streams wait for one, and then end.
if fingerprint ~= '' then redis.call('ZADD', FINGERPRINTS, now + lease, fingerprint) end

local function end_stream(queue, entry, id, gone)
  local rec = read_record(id)
  local waits_here = rec and rec.state == 'queued' and rec.queue == queue and rec.entry == entry
  if waits_here then
    local message = 'no worker serves the model any more that made its tokens (fingerprint ' ..
      gone .. ')'
    finish(id, rec, {state = 'failed', reason = 'model_changed', message = message}, now, retention)
    return true
  end
  -- Whoever runs it from here is about to be reaped, or will end it.
  if not rec or rec.state ~= 'running' then drop_entry(queue, entry) end
  return false
end

local orphans = 0
local function end_streams_of(gone)
  local left = 0
  for _, name in ipairs({'continued:critical', 'continued:normal', 'continued:batch', 'suspects'}) do
    local queue = own_queue(name, gone)
    for _, row in ipairs(attempt(nil, 'XRANGE', queue, '-', '+', 'COUNT', MAX_ORPHANS + 1) or {}) do
      if orphans >= MAX_ORPHANS then more = true break end
      if guarded(end_stream, queue, row[1], row[2][2], gone) then orphans = orphans + 1 end
    end
    left = left + redis.call('EXISTS', queue)
  end
  if left == 0 then redis.call('ZREM', FINGERPRINTS, gone) end
end

local given_up = now - LEASES_TO_RETURN * lease
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', FINGERPRINTS, '-inf', given_up, 'LIMIT', 0, 8)) do
  guarded(end_streams_of, gone)
end

local repaired = 0
local scanned = redis.call('ZSCAN', DEADLINES, times[1] or '0', 'COUNT', MAX_REPAIRED)
for i = 1, #scanned[2], 2 do
  local id = scanned[2][i]
  if guarded(repair, id, now, policy, retention) then
    repaired = repaired + 1
  end
end
keep_usage(now, usage_retention)
redis.call('HSET', PREFIX .. 'sweep', 'cursor', scanned[1], 'swept_at', now,
  'readers_spared_until', reprieve, 'leases_spared_until', spared)
if reaped + repaired > 0 then wake_workers() end

local following = (attempt(nil, 'ZRANGEBYSCORE', READERS, '(' .. now, '+inf', 'WITHSCORES',
  'LIMIT', 0, 1) or {})[2]
local grace = following and math.max(tonumber(following), reprieve) - now or 0
return {expired, reaped, workers, repaired, failed, why, abandoned, more and 1 or 0,
  orphans, grace}
