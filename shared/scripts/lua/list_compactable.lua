--@include lib/common.lua
-- list_compactable: ids of requests whose logs are to be made compact now.
--
-- A worker that gets an id has some time to do it (see compact.lua). No other worker gets the id
-- meanwhile; then it is listed again.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   ended                   zset
-- ARGV
--   after_ms                |whole  how long after the end; empty: never, and the notes are deleted
--   count                   whole   how many ids at most
-- Reply ids, longest ended first
local REDO_MS = 30000
local after_ms, count = arguments(1, 2)
if after_ms ~= '' then after_ms = whole('after_ms', after_ms) end
count = whole('count', count)
local ended = PREFIX .. 'ended'
allow_oom()
if after_ms == '' then
  redis.call('DEL', ended)
  return {}
end
local due = now_ms() - after_ms
local ids = attempt(nil, 'ZRANGEBYSCORE', ended, '-inf', due, 'LIMIT', 0, count) or {}
for _, id in ipairs(ids) do redis.call('ZADD', ended, 'XX', due + REDO_MS, id) end
return ids
