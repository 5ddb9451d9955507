-- Shared by every script of penstock. Included, never run alone.
--
-- All times are Redis TIME in milliseconds: clocks of clients and workers are never used.
-- Keys that a script can only find while it runs (the record and the log of a request it reads
-- from a queue) are built from `prefix`; they carry the same hash tag as every declared key and
-- so lie in the same cluster slot.
--
-- Scripts do not roll back. Writes are ordered so that a script cut short anywhere (a command
-- denied by an ACL, a key of a wrong type) leaves what a sweep can put right: see lib/repair.lua.
--
-- Numbers are handed to redis.call as numbers, which Redis writes with 17 digits. Lua's own
-- tostring and `..` keep 14: enough for counts and milliseconds, not for virtual times.

local GROUP = 'g'
local WEIGHT = {critical = 8, normal = 4, batch = 1}

-- How long beyond its deadline and retention the record of a request stays that nobody ends
-- because no worker runs: ending it takes a sweep.
local ABANDONED_MS = 7 * 24 * 3600 * 1000

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A write that is never refused, before all others: from then on Redis lets the script write
-- although maxmemory is reached. Without it the scripts that free memory could not run.
-- (Redis 7 has the flag allow-oom for this; Redis 6.2 has not.)
local function allow_oom(prefix)
  redis.call('DEL', prefix .. 'oom')
end

local function is_error(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

-- Run a command that may meet a key of a wrong type (or `also`, another error's code). Then nil is
-- returned. Every other error is raised: that a command is denied does not mean that a key is lost.
local function attempt(also, ...)
  local reply = redis.pcall(...)
  if not is_error(reply) then return reply end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then return nil end
  if also and string.find(reply.err, also, 1, true) then return nil end
  error(reply.err)
end

-- The counters of waiting work; sign is +1 when a request starts to wait, -1 when it stops.
local function count_queued(prefix, sign, lane, tenant, cost, bytes)
  local cnt = prefix .. 'cnt'
  redis.call('HINCRBY', cnt, 'requests', sign)
  redis.call('HINCRBY', cnt, 'tokens', sign * cost)
  redis.call('HINCRBY', cnt, 'bytes', sign * bytes)
  redis.call('HINCRBY', cnt, 'requests:' .. lane, sign)
  redis.call('HINCRBY', cnt, 'tokens:' .. lane, sign * cost)
  local field = 'tenant:' .. tenant
  if redis.call('HINCRBY', cnt, field, sign) <= 0 then
    redis.call('HDEL', cnt, field)
  end
end

local function wake_workers(prefix)
  redis.call('XADD', prefix .. 'bell', 'MAXLEN', '1', '*', 'b', '1')
end
