#!/usr/bin/env bash
# penstock from a shell: redis-cli, and nothing else.
#
#   REDIS_URL=redis://localhost:6379 examples/redis_cli.sh "The list type"
#
# With TENANT=acme it uses that tenant's own ingress stream, as a client must that an ACL confines.
set -euo pipefail

prompt=${1-The list type}
prefix="ps:{${SHARD-demo.0}}:"
redis() {
    redis-cli -u "${REDIS_URL-redis://localhost:6379}" --no-auth-warning --raw -e "$@"
}

# Without a field `id` a request has the name of its entry, which XADD prints.
entry=$(redis XADD "${prefix}ingress${TENANT:+:$TENANT}" '*' prompt "$prompt" max_tokens 64 \
    lane critical stop $'\n\n' stop '###' answer json)
log="${prefix}log:${TENANT:+$TENANT.}$entry"

# One event at a time: the stream's name, the entry's, the field, and one line of JSON.
last=0-0
while true; do
    reply=$(redis XREAD COUNT 1 BLOCK 5000 STREAMS "$log" "$last")
    [ -n "$reply" ] || continue
    { read -r _ && read -r last && read -r _ && read -r event; } <<<"$reply"
    case $event in
    '{"end":'*) break ;;
    esac
    text=${event#*'"text":"'}
    text=${text%'","digest":'*}
    printf '%b' "${text//\\\"/\"}" # %b knows the other escapes of a JSON string
done

printf '\n'
case $event in
*'"state":"completed"'*) ;;
*)
    printf '%s\n' "$event" >&2
    exit 1
    ;;
esac
