-- The record of a request, and its end. Included after queue.lua and usage.lua.
--
-- Record request:<id>, a hash. Times are Redis TIME in ms. A field that is not there is 0 or empty.
--
--   state                 queued, running, or one of the terminal states
--   reason, end           why it ended, and the packed End; once ended
--   epoch                 claims so far, the fencing token of every write of its owner
--   worker                the worker that owns it; owned:<worker> has its claim
--   tokens                output tokens in the log
--   claimed_tokens        the same, at the latest claim
--   attempts              claims since it was accepted
--   deaths                workers that died with it
--   blames                of these, how many in a row it may have killed
--   lane, tenant          where it waits
--   cost, output_cost     estimated tokens in all, and of these the output
--   payload, bytes        the packed request, until ended; its size
--   digest                of the payload
--   accepted_at, claimed_at, first_token_at, ended_at
--                         when; claimed_at is the first claim
--   deadline              when it expires
--   queue_deadline        when it expires if no worker has claimed it, if max_queue_ms was set
--   queue, entry          the queue it waits or waited in, and its entry there
--   answer                'json' if log and channel hold JSON; else they hold msgpack
--   inbox                 the inbox it is published in; else it has a channel of its own
--   note                  what its submitter keeps with it for its readers
--   retention             how long record and log are kept after the end, in ms
--   on_disconnect         'cancel' if it ends when its last reader has left
--   shared                1 if such a request was read elsewhere than where it was submitted
--   fingerprint           of the model of the worker that claimed it last
--   usage                 what its workers said last that it has used, until it ends: USED
local FIELDS = {'state', 'epoch', 'worker', 'tokens', 'claimed_tokens', 'attempts', 'deaths',
  'blames', 'lane', 'tenant', 'cost', 'output_cost', 'bytes', 'accepted_at', 'claimed_at',
  'first_token_at', 'deadline', 'queue_deadline', 'queue', 'entry', 'answer', 'inbox',
  'on_disconnect', 'shared', 'fingerprint', 'usage', 'retention'}
local NUMBERS = {'epoch', 'tokens', 'claimed_tokens', 'attempts', 'deaths', 'blames', 'cost',
  'output_cost', 'bytes', 'accepted_at', 'deadline', 'queue_deadline'}

-- The field usage: integers with a space between them.
local USED = {'prompt_tokens', 'cached_tokens', 'drafted_tokens', 'device_us'}
local USED_PATTERN = '^(%d+) (%d+) (%d+) (%d+)$'

-- The record as a table of these fields, or nil if there is none. Numbers default to 0, claimed_at
-- and first_token_at to nil.
local function read_record(id)
  local values = attempt(nil, 'HMGET', PREFIX .. 'request:' .. id, unpack(FIELDS))
  if not values then return nil end
  local rec = {}
  for i, field in ipairs(FIELDS) do rec[field] = values[i] or nil end
  if not rec.state or not rec.lane or not rec.tenant then return nil end
  for _, field in ipairs(NUMBERS) do rec[field] = tonumber(rec[field]) or 0 end
  rec.claimed_at, rec.first_token_at = tonumber(rec.claimed_at), tonumber(rec.first_token_at)
  rec.worker, rec.queue, rec.entry = rec.worker or '', rec.queue or '', rec.entry or ''
  return rec
end

-- How long the answer of a request is kept, in ms: as its submitter said, else `default`.
local function retention_of(rec, default)
  local own = rec.retention or ''
  if #own <= 12 and string.match(own, '^%d+$') then return tonumber(own) end
  return default
end

-- Why the time of a request that has not ended is over; nil while it is not.
local function overdue(rec, now)
  if rec.deadline <= now then return 'deadline' end
  local waits = not rec.claimed_at and rec.queue_deadline > 0
  if waits and rec.queue_deadline <= now then return 'queue_timeout' end
  return nil
end

-- A packed End, as events.End packs it: cmsgpack leaves no nil in a table, and cjson no order.
-- used: its usage by name, or nil.
local function pack_end(tokens, state, reason, message, json, used)
  if json then
    return '{"end":true,"n":' .. tokens .. ',"state":"' .. state .. '","reason":"' .. reason ..
      '","message":' .. cjson.encode(message) .. ',"usage":' ..
      (used and cjson.encode(used) or 'null') .. '}'
  end
  return '\150' .. cmsgpack.pack(-1, tokens, state, reason, message) ..
    (used and cmsgpack.pack(used) or '\192')
end

-- The usage of a request that ends without its worker, or nil if no worker had claimed it.
local function last_usage(rec)
  if not rec.claimed_at then return nil end
  local used = {output_tokens = rec.tokens, queue_ms = rec.claimed_at - rec.accepted_at,
    attempts = rec.attempts}
  if rec.first_token_at then used.ttft_ms = rec.first_token_at - rec.accepted_at end
  local told = {string.match(rec.usage or '', USED_PATTERN)}
  for i, name in ipairs(USED) do used[name] = tonumber(told[i]) or 0 end
  return used
end

-- The usage in a packed End, as a table that lacks what the End lacks.
local function read_usage(event)
  local json = string.sub(event, 1, 1) == '{'
  local read, value = pcall(json and cjson.decode or cmsgpack.unpack, event)
  local used = read and type(value) == 'table' and value[json and 'usage' or 6]
  return type(used) == 'table' and used or {}
end

-- Correct a virtual time by the error of an estimate, but never below what is being served now.
-- Tenants that arrived meanwhile started there, and would wait for the whole difference.
local function correct_virtual_time(key, member, amount, floor)
  local score = redis.call('ZSCORE', key, member)
  if not score then return end
  local corrected = math.max(tonumber(score) + amount, floor or 0)
  redis.call('ZADD', key, 'XX', corrected, member)
end

-- The token count of a log, whether it has its End, and whether it is JSON. A key of another type
-- that holds its name is deleted.
local function log_position(log)
  local last = attempt(nil, 'XREVRANGE', log, '+', '-', 'COUNT', '1')
  if not last then redis.call('DEL', log) end
  if not last or not last[1] then return 0, false, false end
  local tokens, part = string.match(last[1][1], '^(%d+)-(%d+)$')
  return tonumber(tokens), part == '1', string.sub(last[1][2][2] or '', 1, 1) == '{'
end

-- While a script collects them: what is to be published, by inbox, as an array {id, event, id,
-- event, ...}. nil if each event is published at once.
local batches = nil

-- Publish an event: in the request's own channel, or in the inbox it was submitted with.
local function publish(id, inbox, event)
  if not inbox then
    redis.call('PUBLISH', PREFIX .. 'events:' .. id, event)
  elseif not batches then
    redis.call('PUBLISH', PREFIX .. 'inbox:' .. inbox, cmsgpack.pack({id, event}))
  else
    local batch = batches[inbox] or {}
    batches[inbox] = batch
    batch[#batch + 1] = id
    batch[#batch + 1] = event
  end
end

-- Note that a log has ended, for the workers that make logs compact (list_compactable.lua,
-- compact.lua). The notes expire with the last log they may be about.
local function note_ended(id, now, retention)
  local notes = PREFIX .. 'ended'
  if attempt(nil, 'ZADD', notes, now, id) then redis.call('PEXPIRE', notes, retention) end
end

-- Put the End into a log and publish it. (A log that was written by hand may not take it; the
-- record has it too.)
local function log_end(id, tokens, event, inbox)
  attempt('equal or smaller', 'XADD', PREFIX .. 'log:' .. id, tokens .. '-1', 'end', event)
  publish(id, inbox, event)
end

-- finish: the only way a request with a record becomes terminal.
--
--   rec      from read_record
--   how      state, reason; optional: event (packed End; else one is packed here with message and
--            what is known of its usage), spent (tokens really spent; else estimated from what was
--            published)
--
-- Order: the record, which fences its owner at once, and the ledger; then what lib/repair.lua can
-- complete from the record while the request is still in deadlines; deadlines last.
local function finish(id, rec, how, now, retention)
  local record, log = PREFIX .. 'request:' .. id, PREFIX .. 'log:' .. id
  retention = retention_of(rec, retention)
  local top = log_position(log)
  if top > rec.tokens then
    -- An append was cut short between the log and the record.
    if how.event then error('the log of ' .. id .. ' holds more tokens than its owner knows') end
    rec.tokens = top
  end
  local event, used = how.event, nil
  if event then
    used = read_usage(event)
  else
    used = last_usage(rec)
    event = pack_end(rec.tokens, how.state, how.reason, how.message or '', rec.answer == 'json',
      used)
  end
  local row = usage_row(rec.lane, how.state, rec.tenant, now)
  redis.call('HSET', record, 'state', how.state, 'reason', how.reason, 'tokens', rec.tokens,
    'end', event, 'ended_at', now)
  add_usage(row, used or {})
  log_end(id, rec.tokens, event, rec.inbox)
  redis.call('PEXPIRE', record, retention)
  redis.call('PEXPIRE', log, retention)
  redis.call('HDEL', record, 'payload', 'usage')
  if rec.state == 'queued' then
    count_queued(-1, rec.lane, rec.tenant, rec.cost, rec.bytes)
  else
    redis.call('HDEL', PREFIX .. 'owned:' .. rec.worker, id)
  end
  drop_entry(rec.queue, rec.entry, rec.worker)
  redis.call('HINCRBY', PREFIX .. 'counters', 'ended:' .. how.state, 1)
  -- The estimate was charged at the first claim.
  local spent = how.spent or -1
  if spent < 0 then spent = rec.cost - rec.output_cost + rec.tokens end
  if rec.claimed_at and spent ~= rec.cost then
    local wrong = spent - rec.cost
    local floors = redis.call('HMGET', PREFIX .. 'virtual_time', rec.lane, 'lanes')
    correct_virtual_time(PREFIX .. 'tenants:' .. rec.lane, rec.tenant, wrong, tonumber(floors[1]))
    correct_virtual_time(PREFIX .. 'lanes', rec.lane, wrong / (WEIGHT[rec.lane] or 1),
      tonumber(floors[2]))
  end
  if rec.on_disconnect == 'cancel' then attempt(nil, 'ZREM', PREFIX .. 'readers', id) end
  note_ended(id, now, retention)
  redis.call('ZREM', PREFIX .. 'deadlines', id)
end

-- end_orphan: end a request whose record is gone or no record any more (deleted, evicted,
-- overwritten). Readers get their End from the log. What else is known of it: `claim`, the value
-- that owned:<worker> holds, and `values`, its entry in a queue by field. Either may be nil.
local function end_orphan(id, worker, claim, now, retention, values)
  local record, log = PREFIX .. 'request:' .. id, PREFIX .. 'log:' .. id
  local entry, queue = string.match(claim or '', '^%d+ (%S+) (.+)$')
  local is_pending = queue and read_entry(queue, entry, id)
  values = values or is_pending or {}
  local tokens, ended, json = log_position(log)
  if not ended then
    add_usage(usage_row(values.lane, 'failed', values.tenant, now), {output_tokens = tokens})
    log_end(id, tokens, pack_end(tokens, 'failed', 'engine_error',
      'the record of this request was lost in Redis', json))
    redis.call('HINCRBY', PREFIX .. 'counters', 'ended:failed', 1)
  end
  redis.call('PEXPIRE', log, retention)
  redis.call('PEXPIRE', record, retention)
  if is_pending then drop_entry(queue, entry, worker) end
  if claim then redis.call('HDEL', PREFIX .. 'owned:' .. worker, id) end
  redis.call('ZREM', PREFIX .. 'deadlines', id)
end
