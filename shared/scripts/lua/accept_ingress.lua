--@include lib/common.lua
--@include lib/queue.lua
--@include lib/enqueue.lua
--@include lib/finish.lua
--@include lib/ingress.lua
-- accept_ingress: one entry of an intake stream becomes a request, exactly once, with the same verdict and
-- bounds as submit; or gets its End, which says why not. Its time counts from when it was added.
--
-- Runs at maxmemory: what it stores is in Redis already. (It may use a kilobyte more per request
-- than it frees; how many there may be is bounded.)
--
-- KEYS  1 in or in:<tenant>  stream   2 r:<id>  hash   3 t:<id>  stream   4 q:<lane>:<tenant>  stream
--       5 act:<lane>  zset   6 lanes  zset   7 vt  hash   8 dl  zset   9 cnt  hash   10 bell  stream
--       11 r:<own name>  hash   12 t:<own name>  stream; see lib/ingress.lua
-- ARGV  1 prefix   2 entry   3 id   4 own name: the id that nobody else may have
--       5 lane   6 tenant   7 payload   8 digest of the payload   9 cost in tokens (estimate)
--       10 output tokens in it   11 deadline_ms   12 max_queue_ms, 0: none   13 retention_ms
--       14 'json' if answers are to be JSON   15..18 bounds, as in submit
--       19 'cancel' if it is to end when its last reader has left
-- Reply {verdict, id answered}: 'ok', 'dup' (nothing changed), 'conflict', 'full' or 'late' (it
--       got an End), 'broken' (so did it: a key of its own is of a wrong type), 'gone' (another
--       worker was first)
local prefix, entry, rid, own = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local retention, json = tonumber(ARGV[13]), ARGV[14] == 'json'
allow_oom(prefix)
if not entry_exists(KEYS[1], entry) then
  remove_entry(KEYS[1], entry)
  return {'gone', ''}
end

local function no(verdict, state, reason, message)
  return {verdict, answer_refusal(prefix, rid, own, state, reason, message, json, retention)}
end

local function judge()
  local now = now_ms()
  local added, life = added_at(entry, now), tonumber(ARGV[11])
  if added + life <= now and redis.call('EXISTS', KEYS[2]) == 0 then
    return no('late', 'expired', 'deadline', 'its deadline passed before a worker looked')
  end
  local verdict = accept(prefix, rid, {
    lane = ARGV[5], tenant = ARGV[6], payload = ARGV[7], digest = ARGV[8],
    cost = tonumber(ARGV[9]), out = tonumber(ARGV[10]), life = life, wait = tonumber(ARGV[12]),
    epoch = 0, answer = ARGV[14], on_disconnect = ARGV[19],
  }, {tonumber(ARGV[15]), tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[18])}, added,
    retention)
  if is_error(verdict) then
    if not string.find(verdict.err, 'WRONGTYPE', 1, true) then error(verdict.err) end
    return no('broken', 'failed', 'engine_error', 'a key of this request holds another type in Redis')
  end
  if verdict[1] == 'conflict' then
    return no('conflict', 'failed', 'invalid', 'id: ' .. rid ..
      ' was already submitted with another payload; use a new id')
  end
  if verdict[1] == 'full' then
    return no('full', 'failed', 'queue_full', 'the bound on queued ' .. verdict[2] .. ' (' ..
      verdict[3] .. ') is reached; try again later')
  end
  return {verdict[1], rid}
end

local reply = judge()
remove_entry(KEYS[1], entry)
return reply
