--@include lib/common.lua
-- reader_heartbeat: a reader says that it is there, for requests that end when their last reader
-- has left. The sweep ends them; see lib/finish.lua, field on_disconnect.
--
-- Only the latest end of all readers' graces is kept. So a reader that leaves says nothing: its
-- grace ends. Nothing is kept for a request before its first reader comes. A request that is read
-- elsewhere than where it was submitted becomes shared: its submitter alone does not end it then.
--
-- For producer; runs at maxmemory.
--
-- KEYS
--   readers                 zset
--   request:<ids>...        hash
-- ARGV
--   grace_ms                whole
--   inbox                   text    of the reader's process; empty: it has none
--   ids...                  name    at most 256
-- Reply per id: 1 it has a reader until now + grace_ms at least
--       0 it has ended, is not known, or goes on without readers
local grace_ms, inbox = arguments(1, 2, 'both')
grace_ms = whole('grace_ms', grace_ms)
if #KEYS + 1 ~= #ARGV then error('wanted a key for each id') end
allow_oom()
local now = now_ms()
local replies = {}
for i = 2, #KEYS do
  local v = attempt(nil, 'HMGET', KEYS[i], 'state', 'on_disconnect', 'inbox')
  replies[i - 1] = 0
  if v and v[2] == 'cancel' and is_alive(v[1]) then
    redis.call('ZADD', PREFIX .. 'readers', 'GT', now + grace_ms, ARGV[i + 1])
    if (v[3] or '') ~= inbox then redis.call('HSET', KEYS[i], 'shared', 1) end
    replies[i - 1] = 1
  end
end
return replies
