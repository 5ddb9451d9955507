--@include lib/common.lua
-- register: a worker says which model it is about to serve. Workers of one shard serve one model,
-- unless an operator asks for a rolling change.
--
-- A model is known from the first word for it until its last worker has been gone for ten leases
-- and none of its streams waits (sweep.lua). Workers of a known model may always come.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   fingerprints            zset    models by the time when the last worker's word for it ends
-- ARGV
--   fingerprint             name    of the worker's model
--   lease_ms                whole   how long this word for it counts
--   rolling                 0|1     1: even beside workers of another model
-- Reply {'ok'} or {'refused', fingerprint of another model that is served}
local fingerprint, lease_ms, rolling = arguments(1, 3)
name('fingerprint', fingerprint)
lease_ms = whole('lease_ms', lease_ms)
one_of('rolling', rolling, '0', '1')
allow_oom()
local now, served = now_ms(), KEYS[1]

if rolling == '0' and not redis.call('ZSCORE', served, fingerprint) then
  local others = redis.call('ZRANGEBYSCORE', served, '(' .. now, '+inf')
  if others[1] then return {'refused', others[1]} end
end
redis.call('ZADD', served, now + lease_ms, fingerprint)
return {'ok'}
