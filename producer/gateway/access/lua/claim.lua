--@include lib/common.lua
-- claim: a gateway takes over requests of a key whose own gateway counts as dead, to settle them.
--
-- For gateway; runs at maxmemory.
--
-- KEYS
--   leases:<key_id>         zset    as in admit.lua
--   reserved:<key_id>       hash
-- ARGV
--   lease_ms                whole   how long they count as looked after from now on
-- Reply {request, tokens it was charged by estimate, and so on}; at most 256 requests
local lease_ms = whole('lease_ms', (arguments(2, 1)))
local LEASES, RESERVED = unpack(KEYS)
allow_oom()
local now, reply = now_ms(), {}
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 256)) do
  local held = redis.call('HGET', RESERVED, lease)
  if held then
    redis.call('ZADD', LEASES, 'XX', now + lease_ms, lease)
    reply[#reply + 1] = lease
    reply[#reply + 1] = tonumber(string.match(held, '(%d+)$'))
  else
    redis.call('ZREM', LEASES, lease)
  end
end
return reply
