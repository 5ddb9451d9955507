--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
-- rebuild_counters: set the counters of waiting work to what the records say. Runs at maxmemory.
--
-- The counters are right as long as every script runs to its end. An operator runs this after a
-- command was denied by an ACL or keys were deleted by hand. Not bounded: it looks at every
-- request that has not ended, about 10 us each, during which Redis serves nobody else.
--
-- KEYS  1 dl  zset   2 cnt  hash      and the records r:<id> of all members of dl
-- ARGV  1 prefix   2 'look' to count only and change nothing; may be left out
-- Reply {waiting requests, counters that were wrong}
local prefix, repairs = ARGV[1], ARGV[2] ~= 'look'
if repairs then allow_oom(prefix) end
local right = {requests = 0, tokens = 0, bytes = 0}
local function add(field, amount) right[field] = (right[field] or 0) + amount end
for _, rid in ipairs(redis.call('ZRANGE', KEYS[1], '0', '-1')) do
  local rec = read_record(prefix, rid)
  if rec and rec.st == 'queued' then
    add('requests', 1)
    add('tokens', rec.cost)
    add('bytes', rec.len)
    add('requests:' .. rec.lane, 1)
    add('tokens:' .. rec.lane, rec.cost)
    add('tenant:' .. rec.ten, 1)
  end
end
local waiting, wrong = right.requests, 0
local counters = redis.call('HGETALL', KEYS[2])
for i = 1, #counters, 2 do
  local field, value = counters[i], tonumber(counters[i + 1])
  if string.sub(field, 1, 6) ~= 'ended:' then
    if value ~= (right[field] or 0) then wrong = wrong + 1 end
    if repairs and right[field] then
      redis.call('HSET', KEYS[2], field, right[field])
    elseif repairs then
      redis.call('HDEL', KEYS[2], field)
    end
    right[field] = nil
  end
end
for field, value in pairs(right) do
  if value ~= 0 then wrong = wrong + 1 end
  if repairs then redis.call('HSET', KEYS[2], field, value) end
end
return {waiting, wrong}
