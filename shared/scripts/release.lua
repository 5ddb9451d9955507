--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
--@include lib/requeue.lua
-- release: give requests of a worker back to the queues, to be continued by others. Runs at
-- maxmemory.
--
-- Used by a worker that drains (nothing lost), by a supervisor whose worker died (crashed or was
-- killed), and by a worker that audits what it owns: with mode 'except', everything but the ids
-- named goes back, which heals a claim whose reply was lost.
--
-- KEYS  1 own:<wid>  hash   2 wl  zset   3 q:!  stream   4 q:?  stream   5 dl  zset   6 cnt  hash
--       7 dlq  stream   8 bell  stream
--       and, found in own:<wid>: r:<id>, t:<id> and the queue of each request
-- ARGV  1 prefix   2 worker id   3 mode: 'all' (and forget the worker), 'only' or 'except'
--       4 loss, see lib/requeue.lua   5 max_blames   6 max_attempts   7 retention_ms   8... ids
-- Reply {requests released, 1 if there are more: call again}
local MAX_RELEASED = 256
local prefix, wid, mode = ARGV[1], ARGV[2], ARGV[3]
local max_blames, max_attempts, retention = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
allow_oom(prefix)
local now = now_ms()
local named = {}
for i = 8, #ARGV do named[ARGV[i]] = true end

local released, looked, more = 0, 0, 0
local owned = redis.call('HGETALL', KEYS[1])
for i = 1, #owned, 2 do
  local rid = owned[i]
  if mode == 'all' or (mode == 'only') == (named[rid] == true) then
    if looked >= MAX_RELEASED then more = 1 break end
    looked = looked + 1
    local rec = read_record(prefix, rid)
    if not rec then
      bury(prefix, rid, wid, owned[i + 1], now, retention)
    elseif rec.st == 'running' and rec.w == wid then
      requeue(prefix, rid, rec, tonumber(ARGV[4]), now, max_blames, max_attempts, retention)
      released = released + 1
    else
      redis.call('HDEL', KEYS[1], rid)
    end
  end
end
if mode == 'all' and more == 0 then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], wid)
end
if released > 0 then ring(prefix) end
return {released, more}
