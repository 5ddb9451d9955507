--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
-- append: publish what a worker generated for up to 256 requests, and end those that are done.
-- Runs at maxmemory.
--
-- Two guards on every write. The epoch: only the owner by the latest claim may write, so a
-- worker that was thought dead and wakes up can write nothing. (The worker id is compared too:
-- after a failover that lost a claim, two workers may have been given the same epoch.) The index:
-- a chunk is accepted only if it starts at the count of tokens already there, so nothing is
-- doubled and no gap opens. One broken request (wrong type, deleted record) hurts no other.
--
-- Events of requests with an inbox are published together: one message per call and inbox.
--
-- KEYS  1 wl  zset   2 own:<wid>  hash   3 dl  zset   4 cnt  hash
--       then per request: r:<id>  hash, t:<id>  stream
--       and, of requests that end: their queue q:..., act:<lane>, lanes, vt
-- ARGV  1 prefix   2 worker id   3 lease_ms   4 retention_ms
--       5 msgpack array of [id, epoch, start, count, chunk, end, state, reason, tokens spent];
--         chunk is '' if there are no tokens; if the request goes on, the array may end with chunk
--         (which is the shorter way for most tokens), or end is ''
-- Reply an empty array if everything was written (to build and read a long one would cost both
--       sides more than a tenth of the call); else {status, n, status, n, ...} in order of the
--       array, where n is the count now in the log
--       0 written, or an exact repeat of what was written
--       2 not the owner, or terminal: nothing was written
--       3 index mismatch: nothing was written
--       4 no such request; if it was this worker's, its log got an End now
--       9 a key of this request is broken; where that is possible it was ended `failed`
local prefix, wid, retention = ARGV[1], ARGV[2], tonumber(ARGV[4])
local items = cmsgpack.unpack(ARGV[5])
allow_oom(prefix)
local now = now_ms()
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), wid)

local function end_if_owned(rid)
  local claim = redis.call('HGET', KEYS[2], rid)
  if claim then end_orphan(prefix, rid, wid, claim, now, retention) end
end

-- Put the chunk into the log. Returns false if the log can not take it.
local function log_chunk(log, id, chunk)
  if attempt('equal or smaller', 'XADD', log, id, 'd', chunk) then return true end
  -- An earlier call may have been cut short after its first write.
  local there = attempt(nil, 'XRANGE', log, id, id)
  return there ~= nil and there[1] ~= nil and there[1][2][2] == chunk
end

local function write(i, item)
  local rid, epoch, start, count, last = item[1], item[2], item[3], item[4], item[6] or ''
  local record, log = KEYS[3 + 2 * i], KEYS[4 + 2 * i]
  local v = attempt(nil, 'HMGET', record, 'st', 'ep', 'n', 'w', 'ib')
  if not v then
    end_if_owned(rid)
    return 9, 0
  end
  if not v[1] then
    end_if_owned(rid)
    return 4, 0
  end
  local n = tonumber(v[3])
  if tonumber(v[2]) ~= epoch or v[4] ~= wid then return 2, n end
  if v[1] ~= 'running' then
    -- The reply to an earlier, identical call was lost: answer as it would have been answered.
    local reason = redis.call('HGET', record, 'rsn')
    if reason == item[8] and last ~= '' and n == start + count then return 0, n end
    return 2, n
  end
  if count > 0 and n ~= start + count then
    if n ~= start then return 3, n end
    local deadline = start == 0 and tonumber(redis.call('HGET', record, 'dl'))
    -- Written as text, which Redis would do at greater length.
    local top = string.format('%d', n + count)
    if not log_chunk(log, top .. '-0', item[5]) then
      finish(prefix, rid, read_record(prefix, rid), {state = 'failed', reason = 'engine_error',
        message = 'the log of this request was damaged in Redis'}, now, retention)
      return 9, n
    end
    n = n + count
    if start == 0 then
      redis.call('HSET', record, 'n', top, 'tf', now)
      redis.call('PEXPIREAT', log, deadline + retention + ABANDONED_MS)
    else
      redis.call('HSET', record, 'n', top)
    end
    publish(prefix, rid, v[5], item[5])
  elseif n ~= start + count then
    return 3, n
  end
  if last ~= '' then
    finish(prefix, rid, read_record(prefix, rid),
      {state = item[7], reason = item[8], event = last, spent = item[9]}, now, retention)
  end
  return 0, n
end

batches = {}
local reply, all_written = {}, true
for i = 1, #items do
  local ran, status, n = pcall(write, i, items[i])
  if not ran then status, n = 9, 0 end
  reply[2 * i - 1], reply[2 * i] = status, n
  all_written = all_written and status == 0
end
for inbox, batch in pairs(batches) do
  redis.pcall('PUBLISH', prefix .. 'i:' .. inbox, cmsgpack.pack(batch))
end
return all_written and {} or reply
