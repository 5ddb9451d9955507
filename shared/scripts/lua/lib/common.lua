-- Shared by every script of penstock. Included, never run alone.
--
-- All times are Redis TIME in milliseconds: clocks of clients and workers are never used.
-- Every key of a shard begins with the same prefix, which holds the cluster's hash tag. A script
-- builds the names that it finds while it runs (the record behind a queue entry) from that prefix.
--
-- Scripts do not roll back. So a script checks its arguments before it writes. It orders its writes
-- so that a sweep can repair what a script cut short left behind: see lib/repair.lua. (A command
-- denied by an ACL, or a key of another type, cuts a script short.)
--
-- Redis writes a number with 17 digits if redis.call gets it as a number. Lua's own tostring and
-- `..` keep 14: enough for counts and milliseconds, not for virtual times.

local PREFIX = string.match(KEYS[1] or '', '^ps:{[^{}]+}:')
local GROUP = 'workers'
local WEIGHT = {critical = 8, normal = 4, batch = 1}

-- How long a record outlives its deadline and retention if no worker ever runs to end it.
local ABANDONED_MS = 7 * 24 * 3600 * 1000

-- Numbers up to 2^40 add up without loss in the counters and in milliseconds.
local MOST = 1099511627776

-- The first `args` arguments. Refuses a call with fewer keys or arguments than the header lists,
-- or with more, unless the header ends with a repeated one: `more` is 'keys', 'arguments' or
-- 'both'.
local function arguments(keys, args, more)
  if not PREFIX then error('the first key must begin with ps:{MODEL.SHARD}:') end
  local surplus_keys = #KEYS > keys and more ~= 'keys' and more ~= 'both'
  local surplus_args = #ARGV > args and more ~= 'arguments' and more ~= 'both'
  if #KEYS < keys or #ARGV < args or surplus_keys or surplus_args then
    error('wanted ' .. keys .. ' keys and ' .. args .. ' arguments, got ' .. #KEYS .. ' and ' ..
      #ARGV)
  end
  return unpack(ARGV, 1, args)
end

local function refuse_argument(argument, value, wanted)
  error('argument ' .. argument .. ' must be ' .. wanted .. ', got ' .. string.sub(value, 1, 64))
end

-- An integer from 0 to 2^40.
local function whole(argument, value)
  local number = string.find(value, '^%d+$') and tonumber(value)
  if number and number <= MOST then return number end
  refuse_argument(argument, value, 'an integer from 0 to 2^40')
end

-- A text that is not empty.
local function name(argument, value)
  if value ~= '' then return value end
  refuse_argument(argument, value, 'a text that is not empty')
end

-- The id of a stream entry.
local function entry_id(argument, value)
  if string.find(value, '^%d+%-%d+$') then return value end
  refuse_argument(argument, value, 'the id of an entry, such as 1700000000000-0')
end

local function one_of(argument, value, ...)
  for _, allowed in ipairs({...}) do
    if value == allowed then return value end
  end
  refuse_argument(argument, value, 'one of "' .. table.concat({...}, '", "') .. '"')
end

local function lane_name(value)
  return one_of('lane', value, 'critical', 'normal', 'batch')
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A write that Redis never refuses, before all others: from then on Redis lets the script write
-- although maxmemory is reached. Without it the scripts that free memory could not run.
-- (Redis 7 has the flag allow-oom for this; Redis 6.2 has not.)
local function allow_oom()
  redis.call('DEL', PREFIX .. 'oom')
end

local function is_alive(state)
  return state == 'queued' or state == 'running'
end

local function is_error(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

-- Run a command. Returns nil if it meets a key of another type (or `also`, another error's code),
-- and raises every other error: a denied command does not mean that a key is lost.
local function attempt(also, ...)
  local reply = redis.pcall(...)
  if not is_error(reply) then return reply end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then return nil end
  if also and string.find(reply.err, also, 1, true) then return nil end
  error(reply.err)
end

-- The counters of waiting work; sign is +1 when a request starts to wait, -1 when it stops.
local function count_queued(sign, lane, tenant, cost, bytes)
  local counters = PREFIX .. 'counters'
  -- -1 * 0 is -0, which HINCRBY refuses.
  cost, bytes = sign * cost + 0, sign * bytes + 0
  redis.call('HINCRBY', counters, 'requests', sign)
  redis.call('HINCRBY', counters, 'tokens', cost)
  redis.call('HINCRBY', counters, 'bytes', bytes)
  redis.call('HINCRBY', counters, 'requests:' .. lane, sign)
  redis.call('HINCRBY', counters, 'tokens:' .. lane, cost)
  local held, tokens_held = 'tenant:' .. tenant, 'tenant_tokens:' .. tenant
  local bytes_held = 'tenant_bytes:' .. tenant
  if redis.call('HINCRBY', counters, held, sign) <= 0 then
    redis.call('HDEL', counters, held, tokens_held, bytes_held)
  else
    redis.call('HINCRBY', counters, tokens_held, cost)
    redis.call('HINCRBY', counters, bytes_held, bytes)
  end
end

local function wake_workers()
  redis.call('XADD', PREFIX .. 'bell', 'MAXLEN', '1', '*', 'wake', '1')
end
