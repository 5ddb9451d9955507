--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/hand_back.lua
-- audit: a worker says what it knows to own; all else that it owns here goes back to the queues,
-- without blame. Runs at maxmemory.
--
-- This heals a claim whose reply was lost: to be run after every exchange whose outcome is unknown.
--
-- KEYS  1 own:<wid>  hash   2 wl  zset   3 q:!  stream   4 q:?  stream   5 dl  zset   6 cnt  hash
--       7 dlq  stream   8 bell  stream
--       and, found in own:<wid>: r:<id>, t:<id> and the queue of each request
-- ARGV  1 prefix   2 worker id   3 max_blames   4 max_attempts   5 retention_ms   6... known ids
-- Reply {requests given back, 1 if there are more: call again}
local prefix = ARGV[1]
allow_oom(prefix)
local known = {}
for i = 6, #ARGV do known[ARGV[i]] = true end
local function is_astray(rid) return not known[rid] end
local count, more = hand_back(prefix, ARGV[2], is_astray, 0, tonumber(ARGV[3]), tonumber(ARGV[4]),
  tonumber(ARGV[5]))
if count > 0 then ring(prefix) end
return {count, more and 1 or 0}
