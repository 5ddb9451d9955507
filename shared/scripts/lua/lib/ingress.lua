-- Ingress streams: `ingress` and `ingress:<tenant>`, each with the consumer group `workers`. Any
-- Redis client adds entries to them. Included after finish.lua.
--
-- The group only spreads the entries over the workers. An entry counts once because it leaves its
-- stream in the script that acts on it: a later script finds it gone. So any number of workers may
-- read an entry, and no worker's death loses it.

local function entry_exists(ingress, entry)
  local found = attempt(nil, 'XRANGE', ingress, entry, entry)
  return found ~= nil and found[1] ~= nil
end

-- Deleted first: poll_ingress acknowledges what is pending and gone, but nothing would read again
-- what is there and acknowledged. The stream stays when it is empty: workers wait on it.
--
-- Whoever deletes an entry that got an End counts it; row: from usage_row, or nil.
local function remove_entry(ingress, entry, row)
  attempt(nil, 'XDEL', ingress, entry)
  if row then add_usage(row, {}) end
  attempt(nil, 'XACK', ingress, GROUP, entry)
end

-- When an entry was added, by the server's clock: its id says so. A client that chooses an id in
-- the future gains no time.
local function added_at(entry, now)
  return math.min(now, tonumber(string.match(entry, '^%d+')))
end

-- Answer an entry that becomes no request: an End under the id it asked for. If that id is another
-- request's, which must not be touched, then under the entry's own id. Returns the id answered, and
-- the row of the ledger in which that counts.
--
-- It makes no record: the id stays free, so that the same request may be tried again. A log
-- without a record is such an answer, or of no use.
--
-- lane, tenant: of the request it would have been, for the ledger.
local function answer_refusal(id, own_id, state, reason, message, answer, retention, lane, tenant)
  local row = usage_row(lane, state, tenant, now_ms())
  for _, free in ipairs({id, own_id}) do
    if redis.call('EXISTS', PREFIX .. 'request:' .. free) == 0 then
      redis.call('DEL', PREFIX .. 'log:' .. free)
      log_end(free, 0, pack_end(0, state, reason, message, answer == 'json'))
      redis.call('PEXPIRE', PREFIX .. 'log:' .. free, retention)
      redis.call('HINCRBY', PREFIX .. 'counters', 'ended:' .. state, 1)
      return free, row
    end
  end
  return ''
end
