-- Queue streams: q:<lane>:<tenant>, q:!:<lane> (to be continued) and q:? (suspects), each with the
-- consumer group `g`. Included after common.lua.
--
-- An entry is {r id, l lane, t tenant, c cost, b bytes}: with what it adds to the counters, so
-- that they can be put right although the record is gone. An entry leaves its stream only with
-- the request's end or its return to a queue; until then it is pending for its owner.

-- A consumer lives in a group for as long as it has pending entries there and no longer, or the
-- names of all workers there ever were would pile up in queues that never empty.
local function forget_consumer(queue, wid)
  local pending = attempt('NOGROUP', 'XPENDING', queue, GROUP, '-', '+', '1', wid)
  if pending and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, wid) end
end

-- Take an entry out of its queue for good: XACK alone would leave it in the stream. The queue
-- goes with its last entry. A queue that is no stream any more holds nothing to take out.
local function drop_entry(queue, entry, wid)
  if not queue or queue == '' then return end
  if not attempt(nil, 'XACK', queue, GROUP, entry) then return end
  redis.call('XDEL', queue, entry)
  if redis.call('XLEN', queue) == 0 then
    redis.call('DEL', queue)
  elseif wid and wid ~= '' then
    forget_consumer(queue, wid)
  end
end

-- Whether that entry of that queue is this request's. A queue that was deleted and made anew may
-- give an id a second time in the same millisecond, so a name found in an old record proves little.
local function is_entry_of(queue, entry, rid)
  local there = attempt(nil, 'XRANGE', queue, entry, entry)
  return there ~= nil and there[1] ~= nil and there[1][2][2] == rid
end

-- Put a request into a queue. Returns the entry's id, or an error reply if the queue is broken.
local function push_entry(queue, rid, lane, tenant, cost, bytes)
  if redis.call('EXISTS', queue) == 0 then
    local made = redis.pcall('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
    if is_error(made) then return made end
  end
  return redis.pcall('XADD', queue, '*', 'r', rid, 'l', lane, 't', tenant, 'c', cost, 'b', bytes)
end

-- The same for a request that was accepted before and must not be refused: whatever has taken
-- the queue's name gives way.
local function push_back(queue, rid, rec)
  local entry = push_entry(queue, rid, rec.lane, rec.ten, rec.cost, rec.len)
  if not is_error(entry) then return entry end
  if not string.find(entry.err, 'WRONGTYPE', 1, true) then error(entry.err) end
  redis.call('DEL', queue)
  return push_entry(queue, rid, rec.lane, rec.ten, rec.cost, rec.len)
end

-- Start-time fair queueing (Goyal, Vin, Cheng, 1997): who comes back from idle starts at the
-- virtual time being served and can not claim the time it was away.
local function join_lane(prefix, lane, tenant)
  local floors = redis.call('HMGET', prefix .. 'vt', lane, '*')
  redis.call('ZADD', prefix .. 'act:' .. lane, 'NX', floors[1] or 0, tenant)
  redis.call('ZADD', prefix .. 'lanes', 'NX', floors[2] or 0, lane)
end
