--@include lib/common.lua
-- reader_heartbeat: a reader says that it is there, for requests that end when their last reader
-- has left. The sweep ends them; see lib/finish.lua, field on_disconnect.
--
-- Only the latest end of all readers' graces is kept. So a reader that leaves says nothing: its
-- grace ends. Nothing is kept for a request before its first reader comes.
--
-- For producer; runs at maxmemory.
--
-- KEYS
--   readers                 zset
--   request:<ids>...        hash
-- ARGV
--   grace_ms                whole
--   ids...                  name    at most 256
-- Reply per id: 1 it has a reader until now + grace_ms at least
--       0 it has ended, is not known, or goes on without readers
local grace_ms = whole('grace_ms', (arguments(1, 1, 'both')))
if #KEYS ~= #ARGV then error('wanted as many keys as arguments') end
allow_oom()
local now = now_ms()
local replies = {}
for i = 2, #ARGV do
  local v = attempt(nil, 'HMGET', KEYS[i], 'state', 'on_disconnect')
  replies[i - 1] = 0
  if v and v[2] == 'cancel' and is_alive(v[1]) then
    redis.call('ZADD', PREFIX .. 'readers', 'GT', now + grace_ms, ARGV[i])
    replies[i - 1] = 1
  end
end
return replies
