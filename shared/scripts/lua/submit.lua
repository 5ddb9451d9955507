--@include lib/common.lua
--@include lib/queue.lua
--@include lib/enqueue.lua
-- submit: accept a request exactly once, or refuse it, atomically. Refused at maxmemory.
--
-- KEYS  1 r:<id>              hash    record of the request, see lib/finish.lua
--       2 t:<id>              stream  its log
--       3 q:<lane>:<tenant>   stream  its queue
--       4 act:<lane>          zset    tenants of the lane by virtual time
--       5 lanes               zset    lanes by virtual time
--       6 vt                  hash    virtual time last served
--       7 dl                  zset    deadlines
--       8 cnt                 hash    counters of waiting work
--       9 bell                stream  wakes idle workers
-- ARGV  1 prefix   2 id   3 lane   4 tenant   5 payload   6 digest of the payload
--       7 cost in tokens (estimate)   8 output tokens in it   9 deadline_ms
--       10 max_queue_ms, 0: none   11 retention_ms
--       12..15 bounds, 0: none: requests, tokens, bytes, requests per tenant
--       16 'json' if the log is to be JSON; may be left out
--       17 'cancel' if it is to end when its last reader has left; may be left out
--       18 inbox in whose channel it is published, '' for its own; may be left out
-- Reply {'ok', waiting requests}
--       {'dup', state, n}          same id, same payload: nothing was changed
--       {'conflict'}               same id, other payload
--       {'full', bound, limit}     nothing was stored
local prefix, rid, tenant = ARGV[1], ARGV[2], ARGV[4]
return accept(prefix, rid, {
  lane = ARGV[3], tenant = tenant, payload = ARGV[5], digest = ARGV[6], cost = tonumber(ARGV[7]),
  out = tonumber(ARGV[8]), life = tonumber(ARGV[9]), wait = tonumber(ARGV[10]), epoch = 0,
  answer = ARGV[16], on_disconnect = ARGV[17], inbox = ARGV[18],
}, {tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15])}, now_ms(),
  tonumber(ARGV[11]))
