-- The record of a request, and its end. Included after queue.lua.
--
-- Record r:<id>, a hash (times are Redis TIME in ms):
--   st    state                       rsn   reason, once ended     end   packed End, once ended
--   ep    epoch: claims so far, the fencing token of every write of its owner
--   w     worker that owns it         own:<w> holds id -> '<epoch> <entry> <queue>'
--   n     output tokens in the log    nb    n at the latest claim
--   att   claims                      died  owners that died with it
--   bad   of these, how many in a row it may have killed
--   lane, ten                         lane and tenant
--   cost  estimated tokens in all     out   of these, output tokens
--   pay   packed request, until ended len   its bytes              dg    its digest
--   t0    accepted                    t1    first claim            tf    first token
--   t2    ended                       dl    deadline               mq    end of max_queue_ms or 0
--   sk    queue                       sid   entry in it
--   ans   'json' if log and channel hold JSON; else not there, and they hold msgpack
--   ib    inbox in whose channel i:<inbox> it is published; else not there, and that is c:<id>
--   od    'cancel' if it ends when its last reader has left, see reader_heartbeat.lua; else not there
local function read_record(prefix, rid)
  local v = attempt(nil, 'HMGET', prefix .. 'r:' .. rid, 'st', 'ep', 'n', 'w', 'lane', 'ten', 'cost',
    'out', 'len', 'sk', 'sid', 'att', 'bad', 'nb', 'dl', 'mq', 't0', 't1', 'tf', 'died', 'ans',
    'od', 'ib')
  if not v or not v[1] or not v[5] or not v[6] then return nil end
  return {
    st = v[1], ep = tonumber(v[2]) or 0, n = tonumber(v[3]) or 0, w = v[4] or '', lane = v[5],
    ten = v[6], cost = tonumber(v[7]) or 0, out = tonumber(v[8]) or 0, len = tonumber(v[9]) or 0,
    sk = v[10] or '', sid = v[11] or '', att = tonumber(v[12]) or 0, bad = tonumber(v[13]) or 0,
    nb = tonumber(v[14]) or 0, dl = tonumber(v[15]) or 0, mq = tonumber(v[16]) or 0,
    t0 = tonumber(v[17]) or 0, t1 = tonumber(v[18]), tf = tonumber(v[19]),
    died = tonumber(v[20]) or 0, json = v[21] == 'json', needs_reader = v[22] == 'cancel',
    inbox = v[23] or nil,
  }
end

-- Why the time of a request that has not ended is over; nil while it is not.
local function overdue(rec, now)
  if rec.dl <= now then return 'deadline' end
  if not rec.t1 and rec.mq > 0 and rec.mq <= now then return 'queue_timeout' end
  return nil
end

-- A packed End without usage, as events.End packs it: cmsgpack leaves no nil in a table, and cjson
-- no order.
local function pack_end(n, state, reason, message, json)
  if json then
    return '{"end":true,"n":' .. n .. ',"state":"' .. state .. '","reason":"' .. reason ..
      '","message":' .. cjson.encode(message) .. ',"usage":null}'
  end
  return '\150' .. cmsgpack.pack(-1, n, state, reason, message) .. '\192'
end

-- Move a virtual time by what an estimate was wrong, but never below what is being served now:
-- who arrived meanwhile started there, and would wait for the whole difference.
local function correct_virtual_time(key, member, amount, floor)
  local score = redis.call('ZSCORE', key, member)
  if not score then return end
  local settled = math.max(tonumber(score) + amount, floor or 0)
  redis.call('ZADD', key, 'XX', settled, member)
end

-- The token count of a log, whether it has its End, and whether it is JSON. Whatever else has its
-- name gives way.
local function log_position(log)
  local last = attempt(nil, 'XREVRANGE', log, '+', '-', 'COUNT', '1')
  if not last then redis.call('DEL', log) end
  if not last or not last[1] then return 0, false, false end
  local n, part = string.match(last[1][1], '^(%d+)-(%d+)$')
  return tonumber(n), part == '1', string.sub(last[1][2][2] or '', 1, 1) == '{'
end

-- What is to be published in inboxes, by inbox: an array {id, event, id, event, ...}, while a script
-- collects it; nil if each event goes out at once.
local batches = nil

-- Publish an event: in the request's own channel, or in the inbox it was submitted with.
local function publish(prefix, rid, inbox, event)
  if not inbox then
    redis.call('PUBLISH', prefix .. 'c:' .. rid, event)
  elseif not batches then
    redis.call('PUBLISH', prefix .. 'i:' .. inbox, cmsgpack.pack({rid, event}))
  else
    local batch = batches[inbox] or {}
    batches[inbox] = batch
    batch[#batch + 1] = rid
    batch[#batch + 1] = event
  end
end

-- Note for those who make logs compact (list_compactable.lua, compact.lua) that one has ended. The notes go with
-- the last log they may be about.
local function note_ended(prefix, rid, now, retention)
  local notes = prefix .. 'fin'
  if attempt(nil, 'ZADD', notes, now, rid) then redis.call('PEXPIRE', notes, retention) end
end

-- Put the End into a log and publish it. (A log that somebody else wrote into may not take it;
-- the record has it too.)
local function log_end(prefix, rid, n, event, inbox)
  attempt('equal or smaller', 'XADD', prefix .. 't:' .. rid, n .. '-1', 'e', event)
  publish(prefix, rid, inbox, event)
end

-- finish: the only way a request with a record becomes terminal.
--
--   rec      from read_record
--   how      state, reason; optional: event (packed End; else one without usage is packed here
--            with message), spent (tokens really spent; else estimated from what was published)
--
-- Order: the record, which fences its owner at once; then what lib/repair.lua can complete from the
-- record while the request is still in dl; dl last.
local function finish(prefix, rid, rec, how, now, retention)
  local record, log = prefix .. 'r:' .. rid, prefix .. 't:' .. rid
  local top = log_position(log)
  if top > rec.n then
    -- An append was cut short between the log and the record.
    if how.event then error('the log of ' .. rid .. ' holds more tokens than its owner knows') end
    rec.n = top
  end
  local event = how.event or pack_end(rec.n, how.state, how.reason, how.message or '',
    rec.json)
  redis.call('HSET', record, 'st', how.state, 'rsn', how.reason, 'n', rec.n, 'end', event, 't2', now)
  log_end(prefix, rid, rec.n, event, rec.inbox)
  redis.call('PEXPIRE', record, retention)
  redis.call('PEXPIRE', log, retention)
  redis.call('HDEL', record, 'pay')
  if rec.st == 'queued' then
    count_queued(prefix, -1, rec.lane, rec.ten, rec.cost, rec.len)
  else
    redis.call('HDEL', prefix .. 'own:' .. rec.w, rid)
  end
  drop_entry(rec.sk, rec.sid, rec.w)
  redis.call('HINCRBY', prefix .. 'cnt', 'ended:' .. how.state, 1)
  -- The estimate was charged at the first claim.
  local spent = how.spent or -1
  if spent < 0 then spent = rec.cost - rec.out + rec.n end
  if rec.t1 and spent ~= rec.cost then
    local wrong = spent - rec.cost
    local floors = redis.call('HMGET', prefix .. 'vt', rec.lane, '*')
    correct_virtual_time(prefix .. 'act:' .. rec.lane, rec.ten, wrong, tonumber(floors[1]))
    correct_virtual_time(prefix .. 'lanes', rec.lane, wrong / (WEIGHT[rec.lane] or 1),
      tonumber(floors[2]))
  end
  if rec.needs_reader then attempt(nil, 'ZREM', prefix .. 'rd', rid) end
  note_ended(prefix, rid, now, retention)
  redis.call('ZREM', prefix .. 'dl', rid)
end

-- end_orphan: end a request whose record is gone or no record any more (deleted, evicted, overwritten).
-- Readers get their End from the log; what else is known of it is in `claim`, the value that
-- own:<wid> holds, or nil.
local function end_orphan(prefix, rid, wid, claim, now, retention)
  local record, log = prefix .. 'r:' .. rid, prefix .. 't:' .. rid
  local n, ended, json = log_position(log)
  if not ended then
    log_end(prefix, rid, n, pack_end(n, 'failed', 'engine_error',
      'the record of this request was lost in Redis', json))
    redis.call('HINCRBY', prefix .. 'cnt', 'ended:failed', 1)
  end
  redis.call('PEXPIRE', log, retention)
  redis.call('PEXPIRE', record, retention)
  if claim then
    local entry, queue = string.match(claim, '^%d+ (%S+) (.+)$')
    if is_entry_of(queue, entry, rid) then drop_entry(queue, entry, wid) end
    redis.call('HDEL', prefix .. 'own:' .. wid, rid)
  end
  redis.call('ZREM', prefix .. 'dl', rid)
end
