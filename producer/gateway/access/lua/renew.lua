--@include lib/common.lua
-- renew: a gateway says that these requests of a key still run.
--
-- For gateway; runs at maxmemory.
--
-- KEYS
--   leases:<key_id>         zset    as in admit.lua
-- ARGV
--   lease_ms                whole
--   leases...               name
-- Reply how many of them still counted as running
local lease_ms = whole('lease_ms', (arguments(1, 1, 'arguments')))
allow_oom()
local ends, known = now_ms() + lease_ms, 0
for i = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[i])
    known = known + 1
  end
end
return known
