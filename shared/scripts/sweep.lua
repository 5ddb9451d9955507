--@include lib/common.lua
--@include lib/finish.lua
--@include lib/requeue.lua
-- sweep: what time alone must bring about. Any worker may run it at any time.
--
-- Requests past their deadline end `expired`; requests of workers whose lease ended go back to
-- the queues. Bounded per call, so that it never holds the server.
--
-- KEYS  1 dl  zset   2 wl  zset   3 q:!  stream   4 q:?  stream   5 cnt  hash   6 dlq  stream
--       7 bell  stream
--       and, found while running: own:<wid>, r:<id>, t:<id> and queues of what is swept
-- ARGV  1 prefix   2 max_blames   3 max_attempts   4 retention_ms
-- Reply {expired, requests taken from dead workers, dead workers}
local prefix, retention = ARGV[1], tonumber(ARGV[4])
local max_blames, max_attempts = tonumber(ARGV[2]), tonumber(ARGV[3])
local MAX_EXPIRED, MAX_WORKERS, MAX_REAPED = 64, 4, 128
allow_oom(prefix)
local now = now_ms()

local expired = 0
for _, rid in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, MAX_EXPIRED)) do
  local rec = read_record(prefix, rid)
  if rec and (rec.st == 'queued' or rec.st == 'running') then
    local deadline = tonumber(redis.call('HGET', prefix .. 'r:' .. rid, 'dl'))
    local reason = deadline <= now and 'deadline' or 'queue_timeout'
    finish(prefix, rid, 'expired', reason, rec.n, '', '', -1, rec, now, retention)
    expired = expired + 1
  else
    redis.call('ZREM', KEYS[1], rid)
  end
end

local reaped, workers = 0, 0
for _, wid in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, MAX_WORKERS)) do
  local owned = prefix .. 'own:' .. wid
  local left = false
  for _, rid in ipairs(redis.call('HKEYS', owned)) do
    if reaped >= MAX_REAPED then left = true break end
    local rec = read_record(prefix, rid)
    if rec and rec.st == 'running' and rec.w == wid then
      requeue(prefix, rid, rec, '1', now, max_blames, max_attempts, retention)
      reaped = reaped + 1
    else
      redis.call('HDEL', owned, rid)
    end
  end
  -- The lease entry goes last: a sweep cut short is taken up by the next one.
  if not left then
    redis.call('DEL', owned)
    redis.call('ZREM', KEYS[2], wid)
    workers = workers + 1
  end
end
if reaped > 0 then ring(prefix) end
return {expired, reaped, workers}
