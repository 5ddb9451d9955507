--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
-- rebuild_counters: set the counters of waiting work to what the records say.
--
-- The counters are right as long as every script runs to its end. An operator runs this after a
-- command was denied by an ACL or keys were deleted by hand. Not bounded: it looks at every request
-- that has not ended, about 10 us each, during which Redis serves no other client.
--
-- For operator; runs at maxmemory.
--
-- KEYS
--   deadlines               zset
--   counters                hash
-- More keys, found in deadlines: request:<id>
-- ARGV
--   mode                    check|repair  check: count only, and change nothing
-- Reply {waiting requests, counters that were wrong}
local repairs = one_of('mode', (arguments(2, 1)), 'check', 'repair') == 'repair'
local deadlines, counters = PREFIX .. 'deadlines', PREFIX .. 'counters'
if repairs then allow_oom() end
local right = {requests = 0, tokens = 0, bytes = 0}
local function add(field, amount) right[field] = (right[field] or 0) + amount end
for _, id in ipairs(redis.call('ZRANGE', deadlines, '0', '-1')) do
  local rec = read_record(id)
  if rec and rec.state == 'queued' then
    add('requests', 1)
    add('tokens', rec.cost)
    add('bytes', rec.bytes)
    add('requests:' .. rec.lane, 1)
    add('tokens:' .. rec.lane, rec.cost)
    add('tenant:' .. rec.tenant, 1)
    add('tenant_tokens:' .. rec.tenant, rec.cost)
    add('tenant_bytes:' .. rec.tenant, rec.bytes)
  end
end
local waiting, wrong = right.requests, 0
local values = redis.call('HGETALL', counters)
for i = 1, #values, 2 do
  local field, value = values[i], tonumber(values[i + 1])
  if string.sub(field, 1, 6) ~= 'ended:' then
    if value ~= (right[field] or 0) then wrong = wrong + 1 end
    if repairs and right[field] then
      redis.call('HSET', counters, field, right[field])
    elseif repairs then
      redis.call('HDEL', counters, field)
    end
    right[field] = nil
  end
end
for field, value in pairs(right) do
  if value ~= 0 then wrong = wrong + 1 end
  if repairs then redis.call('HSET', counters, field, value) end
end
return {waiting, wrong}
