--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
-- cancel: end a request at once, queued or running. Runs at maxmemory. The owner of a running one
-- learns it by the status of its next append: fencing is the only way anything is stopped.
-- Readers also end a request with it whose time is over, in case no worker lives to sweep.
--
-- KEYS  1 r:<id>  hash   2 t:<id>  stream   3 dl  zset   4 cnt  hash
--       and, found in the record: its queue q:..., own:<wid>, act:<lane>, lanes, vt
-- ARGV  1 prefix   2 id   3 reason: 'client', 'disconnected', or 'deadline' (only if its time is over)
--       4 retention_ms
-- Reply {'cancelled', n} | {'expired', n} | {'early'} if its time is not over
--       | {'ended', state} if it was terminal already | {'unknown'}
local prefix, rid = ARGV[1], ARGV[2]
allow_oom(prefix)
local rec = read_record(prefix, rid)
if not rec then return {'unknown'} end
if rec.st ~= 'queued' and rec.st ~= 'running' then return {'ended', rec.st} end
local now, how = now_ms(), {state = 'cancelled', reason = ARGV[3]}
if ARGV[3] == 'deadline' then
  how = {state = 'expired', reason = overdue(rec, now)}
  if not how.reason then return {'early'} end
end
finish(prefix, rid, rec, how, now, tonumber(ARGV[4]))
return {how.state, rec.n}
