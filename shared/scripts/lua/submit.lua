--@include lib/common.lua
--@include lib/queue.lua
--@include lib/accept.lua
-- submit: accept a request exactly once, or refuse it, atomically.
--
-- For producer; is refused at maxmemory.
--
-- KEYS
--   request:<id>            hash    its record, see lib/finish.lua
--   log:<id>                stream  its token log
--   queue:<lane>:<tenant>   stream  its queue
--   tenants:<lane>          zset    tenants of the lane by virtual time
--   lanes                   zset    lanes by virtual time
--   virtual_time            hash    virtual time last served
--   deadlines               zset    deadlines of all requests that have not ended
--   counters                hash    counters of waiting work
--   bell                    stream  wakes idle workers
-- ARGV
--   id                      name
--   lane                    critical|normal|batch
--   tenant                  name
--   payload                 text    the packed request
--   digest                  text    of the payload
--   cost                    whole   estimated tokens in all
--   output_cost             whole   of these, output tokens
--   deadline_ms             whole   from now
--   max_queue_ms            whole   from now; 0: no bound
--   retention_ms            whole   how long the record outlives its end
--   max_requests            whole   bounds on what waits, 0: none: requests
--   max_tokens              whole   their estimated tokens
--   max_bytes               whole   their packed size
--   max_tenant_requests     whole   requests of this tenant
--   tenant_share            whole   percent of the free room, see lib/accept.lua; 0: no bound
--   answer                  |msgpack|json     form of the log
--   on_disconnect           |continue|cancel  cancel: ends when its last reader has left
--   inbox                   text    publish in this inbox; empty: in a channel of its own
--   note                    text    kept in the record, for whoever reads the request
-- Reply {'ok', waiting requests, accepted_at}
--       {'dup', state, tokens, accepted_at}  same id, same digest: nothing was changed
--       {'conflict'}               same id, other digest: nothing was stored
--       {'full', bound, limit, ms until there may be room}  nothing was stored
local id, lane, tenant, payload, digest, cost, output_cost, deadline_ms, max_queue_ms, retention_ms,
  max_requests, max_tokens, max_bytes, max_tenant_requests, tenant_share, answer, on_disconnect,
  inbox, note = arguments(9, 19)
return accept(name('id', id), {
  lane = lane_name(lane), tenant = name('tenant', tenant), payload = payload, digest = digest,
  cost = whole('cost', cost), output_cost = whole('output_cost', output_cost),
  deadline_ms = whole('deadline_ms', deadline_ms),
  max_queue_ms = whole('max_queue_ms', max_queue_ms), epoch = 0,
  answer = one_of('answer', answer, '', 'msgpack', 'json'),
  on_disconnect = one_of('on_disconnect', on_disconnect, '', 'continue', 'cancel'), inbox = inbox,
  note = note,
}, {
  whole('max_requests', max_requests), whole('max_tokens', max_tokens),
  whole('max_bytes', max_bytes), whole('max_tenant_requests', max_tenant_requests),
  whole('tenant_share', tenant_share),
}, now_ms(), whole('retention_ms', retention_ms))
