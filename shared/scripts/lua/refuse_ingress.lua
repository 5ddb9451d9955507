--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
--@include lib/ingress.lua
-- refuse_ingress: an entry of an ingress stream that is no valid request gets its End and leaves
-- the stream, once.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   <ingress>               stream  ingress or ingress:<tenant>
--   request:<id>            hash
--   log:<id>                stream
--   request:<own_id>        hash
--   log:<own_id>            stream
--   counters                hash
-- ARGV
--   entry                   entry   in the ingress stream
--   id                      name
--   own_id                  name    the id that no other request may have, see lib/ingress.lua
--   state                   completed|failed|cancelled|expired|dead
--   reason                  name
--   message                 text
--   answer                  |msgpack|json  form of the log
--   retention_ms            whole
-- Reply {'refused', id answered} | {'gone', ''} another worker was first
local entry, id, own_id, state, reason, message, answer, retention_ms = arguments(6, 8)
local ingress = KEYS[1]
entry_id('entry', entry)
name('id', id)
name('own_id', own_id)
one_of('state', state, 'completed', 'failed', 'cancelled', 'expired', 'dead')
name('reason', reason)
one_of('answer', answer, '', 'msgpack', 'json')
retention_ms = whole('retention_ms', retention_ms)
allow_oom()
local verdict, answered, row = 'gone', '', nil
if entry_exists(ingress, entry) then
  verdict = 'refused'
  answered, row = answer_refusal(id, own_id, state, reason, message, answer, retention_ms, nil,
    string.match(ingress, '^ps:{[^{}]+}:ingress:(.+)$'))
end
remove_entry(ingress, entry, row)
return {verdict, answered}
