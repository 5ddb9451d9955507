--@include lib/common.lua
-- settle: an admitted request has ended, or was never submitted. It runs no more, and what it was
-- charged by estimate becomes what it has used. Once: a repeat changes nothing.
--
-- For gateway; runs at maxmemory.
--
-- KEYS
--   window:<key_id>         hash    as in admit.lua
--   leases:<key_id>         zset
--   reserved:<key_id>       hash
-- ARGV
--   lease                   name    of the request
--   requests                0|1     0: it was never submitted, and does not count
--   used                    whole   tokens that it has used
-- Reply 1 | 0 it was settled before
local lease, requests, used = arguments(3, 3)
name('lease', lease)
requests, used = tonumber(one_of('requests', requests, '0', '1')), whole('used', used)
local WINDOW, LEASES, RESERVED = unpack(KEYS)
local held = redis.call('HGET', RESERVED, lease)
redis.call('ZREM', LEASES, lease)  -- never refused, so what follows is not, either
if not held then return 0 end
local second, day, cost = string.match(held, '^(%d+) (%d+) (%d+)$')
local found = redis.call('HMGET', WINDOW, second, 'day:' .. day)
if found[1] then
  local count, tokens = string.match(found[1], '^(%d+) (%d+)$')
  redis.call('HSET', WINDOW, second,
    string.format('%.0f %.0f', count - 1 + requests, tokens - cost + used))
end
if found[2] then
  redis.call('HSET', WINDOW, 'day:' .. day, string.format('%.0f', found[2] - cost + used))
end
redis.call('HDEL', RESERVED, lease)
return 1
