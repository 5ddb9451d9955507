-- The plain door: intake streams `in` and `in:<tenant>`, each with the consumer group `g`. Any
-- Redis client adds entries to them. Included after finish.lua.
--
-- The group only spreads the entries over the workers. What makes an entry count once is that it
-- leaves its stream in the script that acts on it: who comes later finds it gone. So an entry may
-- be read by any number of workers, and is lost with none.

local function entry_exists(intake, entry)
  local there = attempt(nil, 'XRANGE', intake, entry, entry)
  return there ~= nil and there[1] ~= nil
end

-- Deleted first: what is pending and gone, a knock acknowledges; what is there and acknowledged,
-- nobody would read again. The stream stays when it is empty: workers wait on it.
local function remove_entry(intake, entry)
  attempt(nil, 'XDEL', intake, entry)
  attempt(nil, 'XACK', intake, GROUP, entry)
end

-- When an entry was added, by the server's clock: its name says so. Nobody gains time by a name
-- of his own making.
local function added_at(entry, now)
  return math.min(now, tonumber(string.match(entry, '^%d+')))
end

-- Answer an entry that becomes no request: an End under the id it asked for. If that is somebody's
-- request, which must not be touched, then under the entry's own name. Returns the id answered.
--
-- There is no record: the id stays free, so that the same request may be tried again. A log
-- without a record is such an answer, or of no use to anybody.
local function answer_refusal(prefix, id, own, state, reason, message, json, retention)
  for _, rid in ipairs({id, own}) do
    if redis.call('EXISTS', prefix .. 'r:' .. rid) == 0 then
      redis.call('DEL', prefix .. 't:' .. rid)
      log_end(prefix, rid, 0, pack_end(0, state, reason, message, json))
      redis.call('PEXPIRE', prefix .. 't:' .. rid, retention)
      redis.call('HINCRBY', prefix .. 'cnt', 'ended:' .. state, 1)
      return rid
    end
  end
  return ''
end
