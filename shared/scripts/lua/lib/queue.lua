-- Queue streams: queue:<lane>:<tenant>, continued:<lane> and suspects, and of the latter two those of
-- one model, each with the consumer group `workers`. Included after common.lua.
--
-- An entry is {id, lane, tenant, cost, bytes}. It holds what it adds to the counters, so that they
-- can be put right although the record is gone. An entry leaves its stream only with the request's
-- end or its return to a queue; until then it is pending for its owner.

-- Blamed so often in a row, a request is a suspect.
local SUSPECT_FROM = 2

-- The queue for those requests of `name` (continued:<lane>, suspects) that only workers with this
-- fingerprint may continue.
local function own_queue(name, fingerprint)
  return PREFIX .. name .. ':' .. fingerprint
end

-- A consumer lives in a group only while it has pending entries there. Otherwise the names of all
-- workers that ever ran would pile up in queues that never empty.
local function forget_consumer(queue, worker)
  local pending = attempt('NOGROUP', 'XPENDING', queue, GROUP, '-', '+', '1', worker)
  if pending and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, worker) end
end

-- Take an entry out of its queue for good: XACK alone would leave it in the stream. The queue
-- goes with its last entry. A queue that is no stream any more holds nothing to take out.
local function drop_entry(queue, entry, worker)
  if not queue or queue == '' then return end
  if not attempt(nil, 'XACK', queue, GROUP, entry) then return end
  redis.call('XDEL', queue, entry)
  if redis.call('XLEN', queue) == 0 then
    redis.call('DEL', queue)
  elseif worker and worker ~= '' then
    forget_consumer(queue, worker)
  end
end

-- The fields of that entry of that queue, or nil unless it is this request's. A queue that was
-- deleted and made anew may repeat an entry id in the same millisecond. So an entry id in an old
-- record proves little.
local function read_entry(queue, entry, id)
  local found = attempt(nil, 'XRANGE', queue, entry, entry)
  if not found or not found[1] then return nil end
  local values = {}
  for i = 1, #found[1][2], 2 do values[found[1][2][i]] = found[1][2][i + 1] end
  return values.id == id and values or nil
end

-- Put a request into a queue. Returns the entry's id, or an error reply if the queue is broken.
local function push_entry(queue, id, lane, tenant, cost, bytes)
  if redis.call('EXISTS', queue) == 0 then
    local made = redis.pcall('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
    if is_error(made) then return made end
  end
  return redis.pcall('XADD', queue, '*', 'id', id, 'lane', lane, 'tenant', tenant, 'cost', cost,
    'bytes', bytes)
end

-- The same for a request that was accepted before and must not be refused: a key of another type
-- that holds the queue's name is deleted.
local function push_back(queue, id, rec)
  local entry = push_entry(queue, id, rec.lane, rec.tenant, rec.cost, rec.bytes)
  if not is_error(entry) then return entry end
  if not string.find(entry.err, 'WRONGTYPE', 1, true) then error(entry.err) end
  redis.call('DEL', queue)
  return push_entry(queue, id, rec.lane, rec.tenant, rec.cost, rec.bytes)
end

-- Start-time fair queueing (Goyal, Vin, Cheng, 1997). A tenant or lane that was idle starts at the
-- virtual time being served, and cannot claim the time it was away.
local function join_lane(lane, tenant)
  local floors = redis.call('HMGET', PREFIX .. 'virtual_time', lane, 'lanes')
  redis.call('ZADD', PREFIX .. 'tenants:' .. lane, 'NX', floors[1] or 0, tenant)
  redis.call('ZADD', PREFIX .. 'lanes', 'NX', floors[2] or 0, lane)
end
