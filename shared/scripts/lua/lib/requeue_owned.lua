-- requeue_owned: requests of a worker go back to the queues, to be continued by others. Included
-- after requeue.lua. Bounded per call.
--
--   wanted   decides for each request, by its id and the value that owned:<worker> holds
--   loss     see requeue.lua
-- Returns how many went back, and whether there are more: then the caller runs it again.
local MAX_REQUEUED = 256

local function requeue_owned(worker, wanted, loss, policy, retention)
  local now, owned_by = now_ms(), PREFIX .. 'owned:' .. worker
  local count, looked = 0, 0
  local owned = redis.call('HGETALL', owned_by)
  for i = 1, #owned, 2 do
    local id = owned[i]
    if wanted(id, owned[i + 1]) then
      if looked >= MAX_REQUEUED then return count, true end
      looked = looked + 1
      local rec = read_record(id)
      if not rec then
        end_orphan(id, worker, owned[i + 1], now, retention)
      elseif rec.state == 'running' and rec.worker == worker then
        requeue(id, rec, loss, now, policy, retention)
        count = count + 1
      else
        redis.call('HDEL', owned_by, id)
      end
    end
  end
  return count, false
end
