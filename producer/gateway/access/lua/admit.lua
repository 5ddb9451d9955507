--@include lib/common.lua
-- admit: let a request of an API key in if all limits of the key allow it; else change nothing.
--
-- Requests and tokens per minute are counted in a window of whole seconds that slides: the second
-- that runs and the 60 before it. So no 60 seconds hold more than the limit, wherever they begin;
-- what a request waits for that is less than a second. (GCRA, ITU-T I.371, with a burst of a
-- minute's allowance would let twice the limit into one minute.)
--
-- Tokens are charged by estimate here, and corrected by settle.lua.
--
-- For gateway; is refused at maxmemory.
--
-- KEYS
--   key:<digest>            hash    the key: key_records.py has its fields
--   window:<key_id>         hash    second -> requests and tokens admitted in it; day -> tokens
--   leases:<key_id>         zset    admitted requests by when their gateway counts as dead; they
--                                   count as running until another one settles them (claim.lua)
--   reserved:<key_id>       hash    admitted request -> second, day and tokens charged
-- ARGV
--   lease                   name    of this request, unique
--   cost                    whole   estimated tokens
--   lease_ms                whole   how long it counts as running unless it is renewed
--   charge                  0|1     0: it joins a request that was charged; only say what is left
-- Reply {verdict, bound, retry_ms, limit of requests, left of it, ms until all of it, the same
--       three of tokens, and how many running requests have a dead gateway}; verdict is 'ok', 'full' (a bound is reached), 'unknown', 'revoked' or
--       'expired' (the key); bound is 'requests', 'tokens', 'concurrent' or 'budget'; a limit of 0
--       is none
local lease, cost, lease_ms, charge = arguments(4, 4)
name('lease', lease)
cost, lease_ms = whole('cost', cost), whole('lease_ms', lease_ms)
one_of('charge', charge, '0', '1')
local KEY, WINDOW, LEASES, RESERVED = unpack(KEYS)
local DAY_S, WINDOW_S, STATE_MS = 86400, 60, 2 * 86400 * 1000
local now = now_ms()
local second = math.floor(now / 1000)
local day = math.floor(second / DAY_S)

local fields = redis.call('HMGET', KEY, 'id', 'revoked_at', 'expires_at', 'requests_per_minute',
  'tokens_per_minute', 'concurrent', 'tokens_per_day')
if not fields[1] then return {'unknown', '', 0, 0, 0, 0, 0, 0, 0, 0} end
if fields[2] then return {'revoked', '', 0, 0, 0, 0, 0, 0, 0, 0} end
if fields[3] and tonumber(fields[3]) <= now then return {'expired', '', 0, 0, 0, 0, 0, 0, 0, 0} end
local limits = {requests = tonumber(fields[4]) or 0, tokens = tonumber(fields[5]) or 0,
  concurrent = tonumber(fields[6]) or 0, budget = tonumber(fields[7]) or 0}

local used, seconds, old, spent = {requests = 0, tokens = 0}, {}, {}, 0
local rows = redis.call('HGETALL', WINDOW)
for i = 1, #rows, 2 do
  local at = tonumber(rows[i])
  if at and at >= second - WINDOW_S then
    local requests, tokens = string.match(rows[i + 1], '^(%d+) (%d+)$')
    seconds[at] = {requests = tonumber(requests), tokens = tonumber(tokens)}
    used.requests = used.requests + seconds[at].requests
    used.tokens = used.tokens + seconds[at].tokens
  elseif at then
    old[#old + 1] = rows[i]
  elseif rows[i] == 'day:' .. day then
    spent = tonumber(rows[i + 1])
  else
    old[#old + 1] = rows[i]
  end
end

-- How long until so much of a window has passed out of it; all of it without `amount`.
local function wait_ms(what, amount)
  local wait = 0
  for at = second - WINDOW_S, second do
    if amount and amount <= 0 then break end
    local bucket = seconds[at]
    if bucket and bucket[what] > 0 then
      wait = (at + WINDOW_S + 1) * 1000 - now
      if amount then amount = amount - bucket[what] end
    end
  end
  return wait
end

local function reply(verdict, bound, retry_ms)
  local answer = {verdict, bound, retry_ms}
  for _, what in ipairs({'requests', 'tokens'}) do
    answer[#answer + 1] = limits[what]
    answer[#answer + 1] = math.max(0, limits[what] - used[what])
    answer[#answer + 1] = wait_ms(what)
  end
  answer[#answer + 1] = redis.call('ZCOUNT', LEASES, '-inf', now)
  return answer
end

if charge == '0' or redis.call('HEXISTS', RESERVED, lease) == 1 then return reply('ok', '', 0) end

if limits.concurrent > 0 and redis.call('ZCARD', LEASES) >= limits.concurrent then
  return reply('full', 'concurrent', 1000)
end
if limits.requests > 0 and used.requests + 1 > limits.requests then
  return reply('full', 'requests', wait_ms('requests', used.requests + 1 - limits.requests))
end
if limits.tokens > 0 and used.tokens + cost > limits.tokens then
  return reply('full', 'tokens', wait_ms('tokens', used.tokens + cost - limits.tokens))
end
if limits.budget > 0 and spent + cost > limits.budget then
  return reply('full', 'budget', (day + 1) * DAY_S * 1000 - now)
end

for _, field in ipairs(old) do redis.call('HDEL', WINDOW, field) end
local bucket = seconds[second] or {requests = 0, tokens = 0}
seconds[second] = {requests = bucket.requests + 1, tokens = bucket.tokens + cost}
used.requests, used.tokens = used.requests + 1, used.tokens + cost
redis.call('HSET', WINDOW, second,
  string.format('%.0f %.0f', seconds[second].requests, seconds[second].tokens),
  'day:' .. day, string.format('%.0f', spent + cost))
redis.call('HSET', RESERVED, lease, string.format('%.0f %.0f %.0f', second, day, cost))
redis.call('ZADD', LEASES, now + lease_ms, lease)
for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], STATE_MS) end
return reply('ok', '', 0)
