--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
-- cancel: end a request at once, queued or running. The owner of a running one learns it by the
-- status of its next append: fencing is the only way in which anything is stopped. Readers also
-- end a request whose time is over, in case no worker lives to sweep.
--
-- For producer; runs at maxmemory.
--
-- KEYS
--   request:<id>            hash
--   log:<id>                stream
--   deadlines               zset
--   counters                hash
-- More keys, found in the record: its queue, owned:<worker>, tenants:<lane>, lanes, virtual_time
-- ARGV
--   id                      name
--   reason                  client|disconnected|deadline  disconnected: only if nobody else has
--                           read it; deadline: only if its time is over
--   retention_ms            whole
-- Reply {'cancelled', tokens} | {'expired', tokens} | {'early', state} it goes on
--       | {'ended', state} it was terminal already | {'unknown'}
local id, reason, retention_ms = arguments(4, 3)
name('id', id)
one_of('reason', reason, 'client', 'disconnected', 'deadline')
retention_ms = whole('retention_ms', retention_ms)
allow_oom()
local rec = read_record(id)
if not rec then return {'unknown'} end
if not is_alive(rec.state) then return {'ended', rec.state} end
if reason == 'disconnected' and rec.shared then return {'early', rec.state} end
local now, how = now_ms(), {state = 'cancelled', reason = reason}
if reason == 'deadline' then
  how = {state = 'expired', reason = overdue(rec, now)}
  if not how.reason then return {'early', rec.state} end
end
finish(id, rec, how, now, retention_ms)
return {how.state, rec.tokens}
