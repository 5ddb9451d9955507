--@include lib/common.lua
-- list_compactable: whose logs are to be made compact now. Runs at maxmemory.
--
-- Who is told of one has a time to do it (see compact.lua) in which nobody else is told; then it
-- is ripe again.
--
-- KEYS  1 fin  zset
-- ARGV  1 prefix   2 how long after the end, in ms; below 0: never, the notes are thrown away
--       3 how many ids at most
-- Reply ids, longest ended first
local REDO_MS = 30000
local prefix, after = ARGV[1], tonumber(ARGV[2])
allow_oom(prefix)
if after < 0 then
  redis.call('DEL', KEYS[1])
  return {}
end
local due = now_ms() - after
local ids = attempt(nil, 'ZRANGEBYSCORE', KEYS[1], '-inf', due, 'LIMIT', 0, ARGV[3]) or {}
for _, rid in ipairs(ids) do redis.call('ZADD', KEYS[1], 'XX', due + REDO_MS, rid) end
return ids
