--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
--@include lib/requeue.lua
--@include lib/requeue_owned.lua
-- audit: a worker says which claims it knows of; what it owns by other claims goes back to the
-- queues, without blame. This heals a claim whose reply was lost: a worker runs it after every
-- exchange whose outcome is unknown, and once a lease for those that arrive even later.
--
-- By epoch, and not by id alone. After a lease that lapsed unnoticed, a worker may own a request
-- anew by a claim whose reply it never got.
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
--   max_blames              whole
--   max_attempts            whole
--   retention_ms            whole
--   known...                text    the claims it knows of: id, epoch, id, epoch, ...
-- Reply {requests given back, 1 if there are more: call again}
local worker, max_blames, max_attempts, retention_ms = arguments(10, 4, 'arguments')
if #ARGV % 2 ~= 0 then error('wanted an epoch for each known claim') end
local policy = {
  max_blames = whole('max_blames', max_blames), max_attempts = whole('max_attempts', max_attempts),
}
name('worker', worker)
retention_ms = whole('retention_ms', retention_ms)
local known = {}
for i = 5, #ARGV, 2 do known[ARGV[i]] = string.format('%d', whole('known', ARGV[i + 1])) end
allow_oom()
local function is_unknown(id, claim) return known[id] ~= string.match(claim, '^%d+') end
local count, more = requeue_owned(worker, is_unknown, 0, policy, retention_ms)
if count > 0 then wake_workers() end
return {count, more and 1 or 0}
