--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/repair.lua
-- sweep: what time alone must bring about. Any worker may run it at any time; runs at maxmemory.
--
-- Requests past their deadline end `expired`; requests that all readers have left, and that asked
-- for it, end `cancelled`; requests of workers whose lease ended go back to the queues; and some
-- requests in turn are looked at for what a script cut short or a deleted key left wrong. Bounded
-- per call, so that it never holds the server.
--
-- KEYS  1 dl  zset   2 wl  zset   3 q:!:critical  stream   4 q:?  stream   5 cnt  hash
--       6 dlq  stream   7 bell  stream   8 vt  hash   9 rd  zset   10 q:!:normal  stream
--       11 q:!:batch  stream
--       and, found while running: own:<wid>, r:<id>, t:<id> and queues of what is swept
-- ARGV  1 prefix   2 max_blames   3 max_attempts   4 retention_ms   5 lease of who sweeps, in ms
-- Reply {expired, requests taken from dead workers, dead workers, repaired, failed, last error,
--        cancelled because their readers left, 1 if a bound ended it: sweep again}
local prefix, retention = ARGV[1], tonumber(ARGV[4])
local max_blames, max_attempts = tonumber(ARGV[2]), tonumber(ARGV[3])
local MAX_EXPIRED, MAX_ABANDONED, MAX_WORKERS, MAX_REAPED, MAX_REPAIRED = 64, 64, 4, 128, 32
local RETRY_MS = 100
-- Sweeps come at least every second. A longer pause is an outage, of the server or of all workers,
-- in which readers could not say that they are there: after it they get time to.
local OUTAGE_MS, REPRIEVE_MS = 3000, 15000
-- Leases are renewed every third of a lease at least, and swept no later than two thirds of one
-- after the last sweep. So much of a lease without a sweep is an outage in which those of the living
-- may have ended, too.
local LEASE_OUTAGE = 0.75
allow_oom(prefix)
local now = now_ms()

local failed, why, more = 0, '', false

-- One request's trouble is not the others'. Returns nil if the work failed.
local function guarded(work, ...)
  local ran, result = pcall(work, ...)
  if ran then return result end
  failed = failed + 1
  why = type(result) == 'table' and result.err or tostring(result)
  return nil
end

local function expire(rid)
  local rec = read_record(prefix, rid)
  if not rec or (rec.st ~= 'queued' and rec.st ~= 'running') then
    repair(prefix, rid, now, max_blames, max_attempts, retention)
    return false
  end
  local reason = overdue(rec, now)
  if not reason then
    local waits = not rec.t1 and rec.mq > 0
    redis.call('ZADD', KEYS[1], waits and math.min(rec.mq, rec.dl) or rec.dl, rid)
    return false
  end
  finish(prefix, rid, rec, {state = 'expired', reason = reason}, now, retention)
  return true
end

local expired = 0
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, MAX_EXPIRED)
if #due == MAX_EXPIRED then more = true end
for _, rid in ipairs(due) do
  local done = guarded(expire, rid)
  if done then expired = expired + 1 end
  -- What fails is tried again later, or it would keep those behind it waiting.
  if done == nil then redis.call('ZADD', KEYS[1], 'XX', now + RETRY_MS, rid) end
end

-- A request that nobody has said to be reading for as long as its last reader's grace.
local function cancel_abandoned(rid)
  local rec = read_record(prefix, rid)
  if rec and rec.needs_reader and (rec.st == 'queued' or rec.st == 'running') then
    finish(prefix, rid, rec, {state = 'cancelled', reason = 'disconnected'}, now, retention)
    return true
  end
  redis.call('ZREM', KEYS[9], rid)
  return false
end

local times = redis.call('HMGET', KEYS[8], 'scan', 'swept', 'reprieve', 'spared')
local pause = now - (tonumber(times[2]) or now)
local reprieve = tonumber(times[3]) or 0
if pause > OUTAGE_MS then reprieve = now + REPRIEVE_MS end
local abandoned = 0
if now >= reprieve then
  local lapsed = attempt(nil, 'ZRANGEBYSCORE', KEYS[9], '-inf', now, 'LIMIT', 0, MAX_ABANDONED) or {}
  if #lapsed == MAX_ABANDONED then more = true end
  for _, rid in ipairs(lapsed) do
    local done = guarded(cancel_abandoned, rid)
    if done then abandoned = abandoned + 1 end
    if done == nil then redis.call('ZADD', KEYS[9], 'XX', now + RETRY_MS, rid) end
  end
end

-- After an outage every lease that ended in it goes on, as long as the living need to renew theirs:
-- nobody can say yet who is dead. It does so once: what was spared and not renewed since, ends.
local lease, spared = tonumber(ARGV[5]), tonumber(times[4]) or 0
if pause > LEASE_OUTAGE * lease then
  for _, wid in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. spared, now)) do
    redis.call('ZADD', KEYS[2], now + lease, wid)
  end
  spared = now + lease
end

local function reap(wid, owned, rid, claim)
  local rec = read_record(prefix, rid)
  if not rec then
    end_orphan(prefix, rid, wid, claim, now, retention)
  elseif rec.st == 'running' and rec.w == wid then
    requeue(prefix, rid, rec, 1, now, max_blames, max_attempts, retention)
    return true
  else
    redis.call('HDEL', owned, rid)
  end
  return false
end

local reaped, workers = 0, 0
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, MAX_WORKERS)
if #dead == MAX_WORKERS then more = true end
for _, wid in ipairs(dead) do
  local owned = prefix .. 'own:' .. wid
  local claims = attempt(nil, 'HGETALL', owned) or {}
  local unfinished = false
  for i = 1, #claims, 2 do
    if reaped >= MAX_REAPED then unfinished = true break end
    if guarded(reap, wid, owned, claims[i], claims[i + 1]) then reaped = reaped + 1 end
  end
  -- The lease goes last: a sweep cut short is taken up by the next one.
  if unfinished then
    more = true
  else
    redis.call('DEL', owned)
    redis.call('ZREM', KEYS[2], wid)
    workers = workers + 1
  end
end

local repaired = 0
local scanned = redis.call('ZSCAN', KEYS[1], times[1] or '0', 'COUNT', MAX_REPAIRED)
for i = 1, #scanned[2], 2 do
  local rid = scanned[2][i]
  if guarded(repair, prefix, rid, now, max_blames, max_attempts, retention) then
    repaired = repaired + 1
  end
end
redis.call('HSET', KEYS[8], 'scan', scanned[1], 'swept', now, 'reprieve', reprieve,
  'spared', spared)
if reaped + repaired > 0 then wake_workers(prefix) end
return {expired, reaped, workers, repaired, failed, why, abandoned, more and 1 or 0}
