--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/requeue_owned.lua
-- release: give requests of a worker back to the queues, to be continued by others. Runs at
-- maxmemory.
--
-- Used by a worker that drains or can not continue some (nothing lost), and by a supervisor whose
-- worker died (crashed or was killed).
--
-- KEYS  1 own:<wid>  hash   2 wl  zset   3 q:!:critical  stream   4 q:?  stream   5 dl  zset
--       6 cnt  hash   7 dlq  stream   8 bell  stream   9 q:!:normal  stream
--       10 q:!:batch  stream
--       and, found in own:<wid>: r:<id>, t:<id> and the queue of each request
-- ARGV  1 prefix   2 worker id   3 mode: 'all' (and forget the worker) or 'only'
--       4 loss, see lib/requeue.lua   5 max_blames   6 max_attempts   7 retention_ms   8... ids
-- Reply {requests released, 1 if there are more: call again}
local prefix, wid, mode = ARGV[1], ARGV[2], ARGV[3]
allow_oom(prefix)
local named = {}
for i = 8, #ARGV do named[ARGV[i]] = true end
local function is_meant(rid) return mode == 'all' or named[rid] == true end
local released, more = requeue_owned(prefix, wid, is_meant, tonumber(ARGV[4]), tonumber(ARGV[5]),
  tonumber(ARGV[6]), tonumber(ARGV[7]))
if mode == 'all' and not more then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], wid)
end
if released > 0 then wake_workers(prefix) end
return {released, more and 1 or 0}
