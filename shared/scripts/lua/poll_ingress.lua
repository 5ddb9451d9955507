--@include lib/common.lua
--@include lib/queue.lua
-- poll_ingress: what a worker must know of the plain door beside the entries it waits for: which intake
-- streams there are, and entries that were read and not acted on. Runs at maxmemory.
--
-- Those are entries that this worker read and never got (its connection broke), and entries of
-- workers without a lease. Bounded by the number of doors, and by the entries wanted.
--
-- KEYS  1 doors  set  tenants with an intake stream of their own   2 wl  zset   3 in  stream
--       and, found in doors: in:<tenant>
-- ARGV  1 prefix   2 worker id   3 entries wanted
-- Reply {tenants whose stream is open ('' for `in`), tenants whose stream's name is taken by
--       something else, entries}; an entry is {tenant, entry, its fields}
local MAX_BYTES = 4 * 1024 * 1024
local prefix, wid, wanted = ARGV[1], ARGV[2], tonumber(ARGV[3])
allow_oom(prefix)
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

-- Make what a reader left pending our own.
local function take_over(tenant, intake, reader)
  local pending = redis.call('XPENDING', intake, GROUP, '-', '+', wanted, reader)
  for _, row in ipairs(pending) do
    if not has_room() then return end
    local there = redis.call('XRANGE', intake, row[1], row[1])
    if there[1] then
      if reader ~= wid then redis.call('XCLAIM', intake, GROUP, wid, '0', row[1], 'JUSTID') end
      found[#found + 1] = {tenant, row[1], there[1][2]}
      bytes = bytes + size(there[1][2])
    else
      redis.call('XACK', intake, GROUP, row[1])
    end
  end
end

local function is_alive(reader)
  local lease = redis.call('ZSCORE', KEYS[2], reader)
  return lease and tonumber(lease) > now
end

-- Returns false if the name is taken by something that is no stream.
local function look_at(tenant)
  local intake = tenant == '' and KEYS[3] or prefix .. 'in:' .. tenant
  if not attempt('NOGROUP', 'XPENDING', intake, GROUP) then
    return attempt(nil, 'XGROUP', 'CREATE', intake, GROUP, '0', 'MKSTREAM') ~= nil
  end
  -- Our own first: what is taken over joins them.
  take_over(tenant, intake, wid)
  for _, reader in ipairs(redis.call('XINFO', 'CONSUMERS', intake, GROUP)) do
    local name = reader[2]
    if name ~= wid and not is_alive(name) then
      take_over(tenant, intake, name)
      forget_consumer(intake, name)
    end
  end
  return true
end

local open, broken = {}, {}
local tenants = attempt(nil, 'SMEMBERS', KEYS[1]) or {}
table.insert(tenants, 1, '')
for _, tenant in ipairs(tenants) do
  local list = look_at(tenant) and open or broken
  list[#list + 1] = tenant
end
return {open, broken, found}
