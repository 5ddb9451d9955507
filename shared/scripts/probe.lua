-- probe: run commands that change nothing, to learn which of them this user may run in a script.
--
-- What a user may do in a script is what he may do outside, but a script is not rolled back when a
-- command in its middle is denied. So `penstock doctor` asks beforehand.
--
-- KEYS  1 r:<a name that no request has>  hash      and what other keys the commands name
-- ARGV  1 msgpack array of commands, each an array of its name and arguments
-- Reply one text per command: the error it gave, or '' if it gave none
local replies = {}
for i, command in ipairs(cmsgpack.unpack(ARGV[1])) do
  local reply = redis.pcall(unpack(command))
  replies[i] = type(reply) == 'table' and reply.err or ''
end
return replies
