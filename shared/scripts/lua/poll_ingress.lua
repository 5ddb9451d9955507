--@include lib/common.lua
--@include lib/queue.lua
-- poll_ingress: which ingress streams there are, and their entries that were read and not acted on.
--
-- Those are entries that this worker read and never got (its connection broke), and entries of
-- workers without a lease. Bounded by the number of streams, and by the entries wanted.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   ingress_tenants         set     tenants with an ingress stream of their own
--   leases                  zset
--   ingress                 stream
-- More keys, found in ingress_tenants: ingress:<tenant>
-- ARGV
--   worker                  name
--   entries                 whole   how many at most
-- Reply {tenants whose stream is open ('' for the shared one), tenants whose stream's name is taken
--       by a key of another type, entries}; an entry is {tenant, entry, its fields}
local MAX_BYTES = 4 * 1024 * 1024
local worker, wanted = arguments(3, 2)
name('worker', worker)
wanted = whole('entries', wanted)
allow_oom()
local now = now_ms()
local found, bytes = {}, 0

local function size(fields)
  local sum = 0
  for _, value in ipairs(fields) do sum = sum + string.len(value) end
  return sum
end

local function has_room()
  return #found < wanted and bytes < MAX_BYTES
end

-- Take over what a reader left pending.
local function take_over(tenant, ingress, reader)
  local pending = redis.call('XPENDING', ingress, GROUP, '-', '+', wanted, reader)
  for _, row in ipairs(pending) do
    if not has_room() then return end
    local entry = redis.call('XRANGE', ingress, row[1], row[1])[1]
    if entry then
      if reader ~= worker then
        redis.call('XCLAIM', ingress, GROUP, worker, '0', row[1], 'JUSTID')
      end
      found[#found + 1] = {tenant, row[1], entry[2]}
      bytes = bytes + size(entry[2])
    else
      redis.call('XACK', ingress, GROUP, row[1])
    end
  end
end

local function has_lease(reader)
  local lease = redis.call('ZSCORE', PREFIX .. 'leases', reader)
  return lease and tonumber(lease) > now
end

-- Returns false if a key of another type holds the stream's name.
local function poll(tenant)
  local ingress = PREFIX .. 'ingress' .. (tenant == '' and '' or ':' .. tenant)
  if not attempt('NOGROUP', 'XPENDING', ingress, GROUP) then
    return attempt(nil, 'XGROUP', 'CREATE', ingress, GROUP, '0', 'MKSTREAM') ~= nil
  end
  -- Our own first: what is taken over joins them.
  take_over(tenant, ingress, worker)
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', ingress, GROUP)) do
    local reader = consumer[2]
    if reader ~= worker and not has_lease(reader) then
      take_over(tenant, ingress, reader)
      forget_consumer(ingress, reader)
    end
  end
  return true
end

local open, broken = {}, {}
local tenants = attempt(nil, 'SMEMBERS', PREFIX .. 'ingress_tenants') or {}
table.insert(tenants, 1, '')
for _, tenant in ipairs(tenants) do
  local list = poll(tenant) and open or broken
  list[#list + 1] = tenant
end
return {open, broken, found}
