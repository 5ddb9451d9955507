--@include lib/common.lua
-- submit: accept a request exactly once, or refuse it, atomically.
--
-- KEYS  1 r:<id>              hash    record of the request
--       2 q:<lane>:<tenant>   stream  its queue
--       3 act:<lane>          zset    tenants of the lane by virtual time
--       4 lanes               zset    lanes by virtual time
--       5 vt                  hash    virtual time last served
--       6 dl                  zset    deadlines
--       7 cnt                 hash    counters of waiting work
--       8 bell                stream  wakes idle workers
-- ARGV  1 prefix   2 id   3 lane   4 tenant   5 payload   6 digest of the payload
--       7 cost in tokens (estimate)   8 deadline_ms   9 max_queue_ms, 0: none
--       10 retention_ms   11..14 bounds, 0: none: requests, tokens, bytes, requests per tenant
-- Reply {'ok', waiting requests}
--       {'dup', state, n}          same id, same payload: nothing was changed
--       {'conflict'}               same id, other payload
--       {'full', bound, limit}     nothing was stored
local prefix, rid, lane, tenant, payload = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local cost, bytes = tonumber(ARGV[7]), string.len(ARGV[5])

local known = redis.call('HMGET', KEYS[1], 'dg', 'st', 'n')
if known[1] then
  if known[1] ~= ARGV[6] then return {'conflict'} end
  return {'dup', known[2], tonumber(known[3]) or 0}
end

local used = redis.call('HMGET', KEYS[7], 'requests', 'tokens', 'bytes', 'tenant:' .. tenant)
local bounds = {'requests', 'tokens', 'bytes', 'tenant_requests'}
local adds = {1, cost, bytes, 1}
for i = 1, 4 do
  local limit = tonumber(ARGV[10 + i])
  if limit > 0 and (tonumber(used[i]) or 0) + adds[i] > limit then
    return {'full', bounds[i], limit}
  end
end

local now = now_ms()
local deadline = now + tonumber(ARGV[8])
local expires = deadline
if tonumber(ARGV[9]) > 0 then expires = math.min(deadline, now + tonumber(ARGV[9])) end

local entry = push_entry(KEYS[2], rid)
if type(entry) == 'table' and entry.err then return redis.error_reply(entry.err) end
redis.call('HSET', KEYS[1], 'st', 'queued', 'ep', 0, 'n', 0, 'att', 0, 'bad', 0, 'lane', lane,
  'ten', tenant, 'pay', payload, 'len', bytes, 'dg', ARGV[6], 'cost', cost, 'dl', deadline,
  't0', now, 'sk', KEYS[2], 'sid', entry)
redis.call('PEXPIREAT', KEYS[1], deadline + tonumber(ARGV[10]))
redis.call('ZADD', KEYS[6], expires, rid)
count_queued(prefix, 1, lane, tenant, cost, bytes)

-- Start-time fair queueing (Goyal, Vin, Cheng, 1997): who comes back from idle starts at the
-- virtual time being served and can not claim the time it was away.
redis.call('ZADD', KEYS[3], 'NX', redis.call('HGET', KEYS[5], lane) or 0, tenant)
redis.call('ZADD', KEYS[4], 'NX', redis.call('HGET', KEYS[5], '*') or 0, lane)
ring(prefix)
return {'ok', (tonumber(used[1]) or 0) + 1}
