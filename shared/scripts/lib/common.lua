-- Shared by every script of penstock. Included, never run alone.
--
-- All times are Redis TIME in milliseconds: clocks of clients and workers are never used.
-- Keys that a script can only find while it runs (the record and the log of a request it reads
-- from a queue) are built from `prefix`; they carry the same hash tag as every declared key and
-- so lie in the same cluster slot.

local GROUP = 'g'
local WEIGHT = {critical = 8, normal = 4, batch = 1}

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

-- Take an entry out of its queue for good: XACK alone would leave it in the stream.
local function drop_entry(queue, entry)
  if not queue or queue == '' then return end
  redis.call('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
  if redis.call('XLEN', queue) == 0 then redis.call('DEL', queue) end
end

-- Put an entry into a queue, creating its consumer group if need be. Returns the entry's id.
local function push_entry(queue, rid)
  local entry = redis.call('XADD', queue, '*', 'r', rid)
  local made = redis.pcall('XGROUP', 'CREATE', queue, GROUP, '0')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    return made
  end
  return entry
end

local function ring(prefix)
  redis.call('XADD', prefix .. 'bell', 'MAXLEN', '1', '*', 'b', '1')
end
