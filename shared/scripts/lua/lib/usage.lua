-- The usage ledger: usage:<day>, a hash per day of Redis TIME (UTC). Included after common.lua.
--
-- A field `<lane> <state> <tenant>` holds what the requests that ended so have used: integers with
-- a space between them, in the order of USAGE. The field `rows` counts the others. Lane and tenant
-- of a request whose record was lost may be `(unknown)`.
--
-- Counted in the script that ends the request, as its fence decides, so each end counts once. A
-- script may be cut short: whoever ends a request reads its row first, and writes it right after
-- the write that makes the end. Both are HSET, so a denied command stops none of them or both.
local USAGE = {'requests', 'prompt_tokens', 'cached_tokens', 'output_tokens', 'drafted_tokens',
  'queue_ms', 'device_us'}
local USAGE_PATTERN = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$'
local DAY_MS = 86400000

-- How long a day's ledger is kept if no worker ever sweeps (sweep.lua sets it by the setting).
local USAGE_RETENTION_MS = 400 * DAY_MS

-- Names of tenants come from outside. When a day has this many rows, ends of tenants without a row
-- count for the tenant `(other)`.
local MAX_USAGE_ROWS = 10000

-- The row in which an end counts, for add_usage. A lane or tenant that is not known is nil.
local function usage_row(lane, state, tenant, now)
  local day = math.floor(now / DAY_MS)
  local row = {key = PREFIX .. 'usage:' .. day, ends = (day + 1) * DAY_MS,
    lane = WEIGHT[lane] and lane or '(unknown)'}
  row.field = row.lane .. ' ' .. state .. ' ' .. (tenant or '(unknown)')
  local found = attempt(nil, 'HMGET', row.key, row.field, 'rows')
  if not found then
    redis.call('DEL', row.key)
    found = {}
  end
  row.rows = tonumber(found[2] or 0) or 0
  if not found[1] and row.rows >= MAX_USAGE_ROWS then
    row.field = row.lane .. ' ' .. state .. ' (other)'
    found = redis.call('HMGET', row.key, row.field)
  end
  row.value = found[1]
  return row
end

local function count(value)
  local number = tonumber(value)
  return number and number >= 0 and number <= MOST and number % 1 == 0 and number or 0
end

-- Count one end.
--
--   used  what it used, by the names of USAGE; what is not there is 0. A request that was not
--         claimed has used nothing.
local function add_usage(row, used)
  local sums = row.value and {string.match(row.value, USAGE_PATTERN)} or {}
  for i, name in ipairs(USAGE) do
    sums[i] = string.format('%.0f', (tonumber(sums[i]) or 0) + (i == 1 and 1 or count(used[name])))
  end
  if row.value then
    redis.call('HSET', row.key, row.field, table.concat(sums, ' '))
  else
    redis.call('HSET', row.key, row.field, table.concat(sums, ' '), 'rows', row.rows + 1)
    redis.call('PEXPIREAT', row.key, row.ends + USAGE_RETENTION_MS)
  end
end

-- Set how long the ledgers of today and of yesterday are kept, from the end of their day on.
local function keep_usage(now, retention)
  local today = math.floor(now / DAY_MS)
  for day = today - 1, today do
    redis.call('PEXPIREAT', PREFIX .. 'usage:' .. day, (day + 1) * DAY_MS + retention)
  end
end
