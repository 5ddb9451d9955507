-- requeue_owned: requests of a worker go back to the queues, to be continued by others. Included after
-- requeue.lua. Bounded per call.
--
--   wanted   whether that one, by its id and the value that own:<wid> holds
--   loss     see requeue.lua
-- Returns how many went back, and whether there are more: then it is to be called again.
local MAX_REQUEUED = 256

local function requeue_owned(prefix, wid, wanted, loss, max_blames, max_attempts, retention)
  local now, owned_by = now_ms(), prefix .. 'own:' .. wid
  local count, looked = 0, 0
  local owned = redis.call('HGETALL', owned_by)
  for i = 1, #owned, 2 do
    local rid = owned[i]
    if wanted(rid, owned[i + 1]) then
      if looked >= MAX_REQUEUED then return count, true end
      looked = looked + 1
      local rec = read_record(prefix, rid)
      if not rec then
        end_orphan(prefix, rid, wid, owned[i + 1], now, retention)
      elseif rec.st == 'running' and rec.w == wid then
        requeue(prefix, rid, rec, loss, now, max_blames, max_attempts, retention)
        count = count + 1
      else
        redis.call('HDEL', owned_by, rid)
      end
    end
  end
  return count, false
end
