--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/requeue_owned.lua
-- release: give requests of a worker back to the queues, to be continued by others.
--
-- A worker runs it when it drains or cannot continue some requests (nothing is lost), and a
-- supervisor when its worker died (crashed or was killed).
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   owned:<worker>          hash
--   leases                  zset
--   continued:critical      stream
--   continued:normal        stream
--   continued:batch         stream
--   suspects                stream
--   deadlines               zset
--   counters                hash
--   dead_letters            stream
--   bell                    stream
-- More keys, found in owned:<worker>: request:<id>, log:<id> and the queue of each request
-- ARGV
--   worker                  name
--   mode                    all|only  all its requests, and forget the worker; or only these ids
--   loss                    0|1|2     see lib/requeue.lua
--   max_blames              whole
--   max_attempts            whole
--   retention_ms            whole
--   ids...                  name
-- Reply {requests released, 1 if there are more: call again}
local worker, mode, loss, max_blames, max_attempts, retention_ms = arguments(10, 6, 'arguments')
name('worker', worker)
one_of('mode', mode, 'all', 'only')
loss = tonumber(one_of('loss', loss, '0', '1', '2'))
local policy = {
  max_blames = whole('max_blames', max_blames), max_attempts = whole('max_attempts', max_attempts),
}
retention_ms = whole('retention_ms', retention_ms)
allow_oom()
local named = {}
for i = 7, #ARGV do named[ARGV[i]] = true end
local function is_meant(id) return mode == 'all' or named[id] == true end
local released, more = requeue_owned(worker, is_meant, loss, policy, retention_ms)
if mode == 'all' and not more then
  redis.call('DEL', PREFIX .. 'owned:' .. worker)
  redis.call('ZREM', PREFIX .. 'leases', worker)
end
if released > 0 then wake_workers() end
return {released, more and 1 or 0}
