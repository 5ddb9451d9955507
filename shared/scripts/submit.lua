--@include lib/common.lua
--@include lib/queue.lua
--@include lib/enqueue.lua
-- submit: accept a request exactly once, or refuse it, atomically. Refused at maxmemory.
--
-- KEYS  1 r:<id>              hash    record of the request, see lib/finish.lua
--       2 t:<id>              stream  its log
--       3 q:<lane>:<tenant>   stream  its queue
--       4 act:<lane>          zset    tenants of the lane by virtual time
--       5 lanes               zset    lanes by virtual time
--       6 vt                  hash    virtual time last served
--       7 dl                  zset    deadlines
--       8 cnt                 hash    counters of waiting work
--       9 bell                stream  wakes idle workers
-- ARGV  1 prefix   2 id   3 lane   4 tenant   5 payload   6 digest of the payload
--       7 cost in tokens (estimate)   8 output tokens in it   9 deadline_ms
--       10 max_queue_ms, 0: none   11 retention_ms
--       12..15 bounds, 0: none: requests, tokens, bytes, requests per tenant
-- Reply {'ok', waiting requests}
--       {'dup', state, n}          same id, same payload: nothing was changed
--       {'conflict'}               same id, other payload
--       {'full', bound, limit}     nothing was stored
local prefix, rid, tenant = ARGV[1], ARGV[2], ARGV[4]
local cost = tonumber(ARGV[7])

local known = redis.call('HMGET', KEYS[1], 'dg', 'st', 'n')
if known[2] then
  if known[1] ~= ARGV[6] then return {'conflict'} end
  return {'dup', known[2], tonumber(known[3]) or 0}
end

local used = redis.call('HMGET', KEYS[8], 'requests', 'tokens', 'bytes', 'tenant:' .. tenant)
local bounds = {'requests', 'tokens', 'bytes', 'tenant_requests'}
local adds = {1, cost, string.len(ARGV[5]), 1}
for i = 1, 4 do
  local limit = tonumber(ARGV[11 + i])
  if limit > 0 and (tonumber(used[i]) or 0) + adds[i] > limit then
    return {'full', bounds[i], limit}
  end
end

local refused = enqueue(prefix, rid, {
  lane = ARGV[3], tenant = tenant, payload = ARGV[5], digest = ARGV[6], cost = cost,
  out = tonumber(ARGV[8]), life = tonumber(ARGV[9]), wait = tonumber(ARGV[10]), epoch = 0,
}, now_ms(), tonumber(ARGV[11]))
if refused then return redis.error_reply(refused.err) end
return {'ok', (tonumber(used[1]) or 0) + 1}
