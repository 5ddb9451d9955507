--@include lib/common.lua
-- reader_heartbeat: a reader says that it is there, for requests that are to be cancelled when their last
-- reader has left. The sweep does that; see lib/finish.lua, field od. Runs at maxmemory.
--
-- Only the latest end of all readers' graces is kept, so a reader cannot say that it leaves: it
-- falls silent. Nothing is kept for a request before its first reader comes.
--
-- KEYS  1 rd  zset   then per request: r:<id>  hash
-- ARGV  1 prefix   2 grace_ms   3... ids, at most 256
-- Reply per id: 1 it has a reader until now + grace_ms at least
--       0 it has ended, is not known, or goes on without readers
local prefix, grace = ARGV[1], tonumber(ARGV[2])
allow_oom(prefix)
local now = now_ms()
local replies = {}
for i = 3, #ARGV do
  local v = attempt(nil, 'HMGET', KEYS[i - 1], 'st', 'od')
  replies[i - 2] = 0
  if v and v[2] == 'cancel' and (v[1] == 'queued' or v[1] == 'running') then
    redis.call('ZADD', KEYS[1], 'GT', now + grace, ARGV[i])
    replies[i - 2] = 1
  end
end
return replies
