--@include lib/common.lua
--@include lib/queue.lua
--@include lib/enqueue.lua
-- redrive: give a dead request a new life under its id, from its dead letter. It starts at token
-- 0 with a new deadline of the same length; bounds at the door do not apply. Refused at maxmemory.
--
-- KEYS  1 dlq  stream   2 r:<id>  hash   3 t:<id>  stream   4 q:<lane>:<tenant>  stream
--       5 act:<lane>  zset   6 lanes  zset   7 vt  hash   8 dl  zset   9 cnt  hash   10 bell  stream
-- ARGV  1 prefix   2 entry id of the dead letter   3 retention_ms
-- Reply {'ok'} | {'gone'} no such dead letter | {'busy', state} the id is in use again
local letter = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
if not letter[1] then return {'gone'} end
local f = {}
for i = 1, #letter[1][2], 2 do f[letter[1][2][i]] = letter[1][2][i + 1] end
local state = redis.call('HGET', KEYS[2], 'st')
if state and state ~= 'dead' then return {'busy', state} end
local refused = enqueue(ARGV[1], f.r, {
  lane = f.lane, tenant = f.ten, payload = f.pay, digest = f.dg, cost = tonumber(f.cost),
  out = tonumber(f.out), life = tonumber(f.life), wait = tonumber(f.wait), epoch = tonumber(f.ep),
  answer = f.ans, on_disconnect = f.od,
}, now_ms(), tonumber(ARGV[3]))
if refused then return redis.error_reply(refused.err) end
redis.call('XDEL', KEYS[1], ARGV[2])
return {'ok'}
