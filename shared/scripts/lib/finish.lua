-- finish: the only way a request becomes terminal. Included after common.lua.
--
--   rid, reason, state   what ended and why (docs/protocol.md lists the closed set)
--   n                    output tokens in the log
--   event                packed End; '' lets the script pack one without usage
--   message              for a person; used when event is ''
--   actual               tokens really spent, to correct the tenant's virtual time; -1: unknown
--   rec                  st, w, lane, ten, cost, len, sk, sid of the record
--
-- Order: the log first, since it is the truth; then the record; then what can be repaired from
-- the record by a sweep should the script be cut short (scripts do not roll back).
local function finish(prefix, rid, state, reason, n, event, message, actual, rec, now, retention_ms)
  local record, log = prefix .. 'r:' .. rid, prefix .. 't:' .. rid
  if event == '' then event = cmsgpack.pack({-1, n, state, reason, message}) end
  local wrote = redis.pcall('XADD', log, n .. '-1', 'e', event)
  if type(wrote) == 'table' and wrote.err and string.find(wrote.err, 'WRONGTYPE', 1, true) then
    redis.call('DEL', log)
    redis.call('XADD', log, n .. '-1', 'e', event)
  end
  redis.call('HSET', record, 'st', state, 'rsn', reason, 'n', n, 'end', event, 't2', now)
  redis.call('HDEL', record, 'pay')
  redis.call('PUBLISH', prefix .. 'c:' .. rid, event)
  redis.call('ZREM', prefix .. 'dl', rid)
  if rec.st == 'queued' then
    count_queued(prefix, -1, rec.lane, rec.ten, rec.cost, rec.len)
  else
    redis.call('HDEL', prefix .. 'own:' .. rec.w, rid)
  end
  drop_entry(rec.sk, rec.sid)
  redis.call('HINCRBY', prefix .. 'cnt', 'ended:' .. state, 1)
  redis.call('PEXPIRE', record, retention_ms)
  redis.call('PEXPIRE', log, retention_ms)
  -- The tenant was charged an estimate when the request was claimed; settle the difference.
  if actual >= 0 and rec.st == 'running' then
    local tenants = prefix .. 'act:' .. rec.lane
    if redis.call('ZSCORE', tenants, rec.ten) then
      redis.call('ZINCRBY', tenants, actual - rec.cost, rec.ten)
    end
  end
end

local function read_record(prefix, rid)
  local v = redis.pcall('HMGET', prefix .. 'r:' .. rid,
    'st', 'ep', 'n', 'w', 'lane', 'ten', 'cost', 'len', 'sk', 'sid', 'att', 'bad', 'nb', 'pay')
  if v.err or not v[1] then return nil end
  return {
    st = v[1], ep = tonumber(v[2]) or 0, n = tonumber(v[3]) or 0, w = v[4] or '', lane = v[5],
    ten = v[6], cost = tonumber(v[7]) or 0, len = tonumber(v[8]) or 0, sk = v[9], sid = v[10],
    att = tonumber(v[11]) or 0, bad = tonumber(v[12]) or 0, nb = tonumber(v[13]) or 0,
    pay = v[14] or '',
  }
end
