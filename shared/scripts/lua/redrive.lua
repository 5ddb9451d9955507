--@include lib/common.lua
--@include lib/queue.lua
--@include lib/accept.lua
-- redrive: give a dead request a new life under its id, from its dead letter. It starts at token
-- 0 with a new deadline of the same length; the bounds on waiting work do not apply.
--
-- For operator; is refused at maxmemory.
--
-- KEYS
--   dead_letters            stream
--   request:<id>            hash
--   log:<id>                stream
--   queue:<lane>:<tenant>   stream
--   tenants:<lane>          zset
--   lanes                   zset
--   virtual_time            hash
--   deadlines               zset
--   counters                hash
--   bell                    stream
-- ARGV
--   entry                   entry   of the dead letter
--   retention_ms            whole
-- Reply {'ok'} | {'gone'} no such dead letter | {'busy', state} the id is in use again
local entry, retention_ms = arguments(10, 2)
entry_id('entry', entry)
retention_ms = whole('retention_ms', retention_ms)
local letter = redis.call('XRANGE', PREFIX .. 'dead_letters', entry, entry)[1]
if not letter then return {'gone'} end
local f = {}
for i = 1, #letter[2], 2 do f[letter[2][i]] = letter[2][i + 1] end
local state = redis.call('HGET', PREFIX .. 'request:' .. f.id, 'state')
if state and state ~= 'dead' then return {'busy', state} end
local refused = enqueue(f.id, {
  lane = f.lane, tenant = f.tenant, payload = f.payload, digest = f.digest,
  cost = whole('cost', f.cost), output_cost = whole('output_cost', f.output_cost),
  deadline_ms = whole('deadline_ms', f.deadline_ms),
  max_queue_ms = whole('max_queue_ms', f.max_queue_ms), epoch = whole('epoch', f.epoch),
  answer = f.answer, on_disconnect = f.on_disconnect, note = f.note,
}, now_ms(), f.retention and whole('retention', f.retention) or retention_ms)
if refused then return redis.error_reply(refused.err) end
redis.call('XDEL', PREFIX .. 'dead_letters', entry)
return {'ok'}
