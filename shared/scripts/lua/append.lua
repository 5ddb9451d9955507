--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
-- append: publish what a worker generated for up to 256 requests, and end those that are done.
--
-- Two guards on every write. The epoch: only the owner by the latest claim may write, so a worker
-- that counted as dead and wakes up can write nothing. (The worker id is compared too: after a
-- failover that lost a claim, two workers may have the same epoch.) The index: a chunk must start
-- at the count of tokens already there, so no token is doubled and no gap opens. A broken request
-- (wrong type, deleted record) harms no other.
--
-- Events of requests with an inbox are published together: one message per call and inbox.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   leases                  zset
--   owned:<worker>          hash
--   deadlines               zset
--   counters                hash
--   request:<id>...         hash    for each row, with its log
--   log:<id>...             stream
-- More keys, found in the records of requests that end: their queue, tenants:<lane>, lanes,
-- virtual_time
-- ARGV
--   worker                  name
--   lease_ms                whole
--   retention_ms            whole
--   rows                    text    msgpack array of rows
-- A row is [id, epoch, start, count, chunk, end, state, reason, tokens spent, usage]. chunk is '' if
-- there are no tokens. If the request goes on, the row may end with chunk (the shorter form, for
-- most tokens), or end is ''. Tokens spent is -1 if unknown. usage, which comes now and then with
-- tokens of a request that goes on, is what it has used so far: the field of its record in
-- lib/finish.lua. The packed end of one that has ended holds its own.
-- Reply an empty array if everything was written (building and reading a long one would cost each
--       side more than a tenth of the call); else {status, tokens, status, tokens, ...} in order of
--       the rows, with the count now in the log
--       0 written, or an exact repeat of what was written
--       2 not the owner, or terminal: nothing was written
--       3 index mismatch: nothing was written
--       4 no such request; if it was this worker's, its log got an End now
--       9 the row is malformed, or a key of this request is broken; if possible it ended `failed`
local worker, lease_ms, retention_ms, rows = arguments(4, 4, 'keys')
name('worker', worker)
lease_ms, retention_ms = whole('lease_ms', lease_ms), whole('retention_ms', retention_ms)
local unpacked, items = pcall(cmsgpack.unpack, rows)
if not unpacked or type(items) ~= 'table' or #KEYS ~= 4 + 2 * #items then
  refuse_argument('rows', '', 'a msgpack array with a row for each two keys after the fourth')
end
local OWNED = PREFIX .. 'owned:' .. worker
local TERMINAL = {completed = true, failed = true, cancelled = true, expired = true, dead = true}
allow_oom()
local now = now_ms()
redis.call('ZADD', PREFIX .. 'leases', now + lease_ms, worker)

local function end_if_owned(id)
  local claim = redis.call('HGET', OWNED, id)
  if claim then end_orphan(id, worker, claim, now, retention_ms) end
end

-- Put the chunk into the log. Returns false if the log cannot take it.
local function log_chunk(log, entry, chunk)
  if attempt('equal or smaller', 'XADD', log, entry, 'chunk', chunk) then return true end
  -- An earlier call may have been cut short after its first write.
  local found = attempt(nil, 'XRANGE', log, entry, entry)
  return found ~= nil and found[1] ~= nil and found[1][2][2] == chunk
end

local function write(i, row)
  local id, epoch, start, count, last = row[1], row[2], row[3], row[4], row[6] or ''
  local record, log = KEYS[3 + 2 * i], KEYS[4 + 2 * i]
  -- (NaN is not equal to itself.) The start is compared with an integer below.
  if not (count >= 0 and count % 1 == 0) then error('count') end
  if last ~= '' and not (TERMINAL[row[7]] and row[9] >= -1 and row[9] % 1 == 0) then
    error('state or tokens spent')
  end
  local used = row[10] or ''
  if used ~= '' and not string.find(used, USED_PATTERN) then error('usage') end
  local v = attempt(nil, 'HMGET', record, 'state', 'epoch', 'tokens', 'worker', 'inbox')
  if not v then
    end_if_owned(id)
    return 9, 0
  end
  if not v[1] then
    end_if_owned(id)
    return 4, 0
  end
  local tokens = tonumber(v[3])
  if tonumber(v[2]) ~= epoch or v[4] ~= worker then return 2, tokens end
  if v[1] ~= 'running' then
    -- The reply to an earlier, identical call was lost: answer as it would have been answered.
    local reason = redis.call('HGET', record, 'reason')
    if reason == row[8] and last ~= '' and tokens == start + count then return 0, tokens end
    return 2, tokens
  end
  if count > 0 and tokens ~= start + count then
    if tokens ~= start then return 3, tokens end
    local deadline = start == 0 and tonumber(redis.call('HGET', record, 'deadline'))
    -- Written as text, which Redis would do at greater length.
    local top = string.format('%d', tokens + count)
    if not log_chunk(log, top .. '-0', row[5]) then
      finish(id, read_record(id), {state = 'failed', reason = 'engine_error',
        message = 'the log of this request was damaged in Redis'}, now, retention_ms)
      return 9, tokens
    end
    tokens = tokens + count
    if start == 0 then
      redis.call('HSET', record, 'tokens', top, 'first_token_at', now)
      redis.call('PEXPIREAT', log, deadline + retention_ms + ABANDONED_MS)
    else
      redis.call('HSET', record, 'tokens', top)
    end
    if used ~= '' then redis.call('HSET', record, 'usage', used) end
    publish(id, v[5], row[5])
  elseif tokens ~= start + count then
    return 3, tokens
  end
  if last ~= '' then
    finish(id, read_record(id),
      {state = row[7], reason = row[8], event = last, spent = row[9]}, now, retention_ms)
  end
  return 0, tokens
end

batches = {}
local reply, all_written = {}, true
for i = 1, #items do
  local ran, status, tokens = pcall(write, i, items[i])
  if not ran then status, tokens = 9, 0 end
  reply[2 * i - 1], reply[2 * i] = status, tokens
  all_written = all_written and status == 0
end
for inbox, batch in pairs(batches) do
  redis.pcall('PUBLISH', PREFIX .. 'inbox:' .. inbox, cmsgpack.pack(batch))
end
return all_written and {} or reply
