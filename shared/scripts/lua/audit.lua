--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/requeue_owned.lua
-- audit: a worker says which claims it knows of; what it owns here by others goes back to the
-- queues, without blame. Runs at maxmemory.
--
-- By epoch, and not by id alone: a worker whose lease lapsed unnoticed may own anew, by a claim it
-- never heard of, what it knows from the claim before.
--
-- This heals a claim whose reply was lost: to be run after every exchange whose outcome is unknown.
--
-- KEYS  1 own:<wid>  hash   2 wl  zset   3 q:!:critical  stream   4 q:?  stream   5 dl  zset
--       6 cnt  hash   7 dlq  stream   8 bell  stream   9 q:!:normal  stream
--       10 q:!:batch  stream
--       and, found in own:<wid>: r:<id>, t:<id> and the queue of each request
-- ARGV  1 prefix   2 worker id   3 max_blames   4 max_attempts   5 retention_ms
--       6... known claims: id, epoch
-- Reply {requests given back, 1 if there are more: call again}
local prefix = ARGV[1]
allow_oom(prefix)
local known = {}
for i = 6, #ARGV, 2 do known[ARGV[i]] = ARGV[i + 1] end
local function is_astray(rid, claim) return known[rid] ~= string.match(claim, '^%d+') end
local count, more = requeue_owned(prefix, ARGV[2], is_astray, 0, tonumber(ARGV[3]), tonumber(ARGV[4]),
  tonumber(ARGV[5]))
if count > 0 then wake_workers(prefix) end
return {count, more and 1 or 0}
