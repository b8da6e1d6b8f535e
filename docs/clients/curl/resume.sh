#!/usr/bin/env bash
# A stream that survives its connection and its gateway; bash and curl alone. Prints the events, each once.
# RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.
set -euo pipefail
IFS=, read -ra GATEWAYS <<<"${RYZANSTEIN_URL:-http://127.0.0.1:8000}"
AUTHORIZATION="Authorization: Bearer ${RYZANSTEIN_API_KEY:-none}"
TRIES=20 # in a row without anything new
MODEL=$(curl -sSf "${GATEWAYS[0]}/v1/models" -H "$AUTHORIZATION" | grep -o '"id": *"[^"]*"' | head -1 | cut -d'"' -f4)
BODY='{"model": "'"$MODEL"'", "stream": true, "max_tokens": 200, "messages": [{"role": "user", "content": "Tell me a story."}]}'
KEY=$(cat /proc/sys/kernel/random/uuid) # the same request under the same key is the same generation, everywhere
last= tries=0

for ((turn = 0; tries <= TRIES; turn++)); do
  resume=()
  [[ -n $last ]] && resume=(-H "Last-Event-ID: $last")
  data= id=
  while IFS= read -r line; do # the last line has no line break where the connection was cut: it does not count
    case $line in
      "data: "*) data=${line#data: } ;;
      "id: "*) id=${line#id: } ;;
      "{"*) # no stream: a refusal
        grep -qE '"(unavailable|queue_full|rate_limit_exceeded|broker_unavailable)"' <<<"$line" && continue
        echo "$line" >&2
        exit 1
        ;;
      "") # the event is whole
        [[ -z $data ]] && continue
        [[ $data == '{"error"'* ]] && break # of this gateway, or the end: the next try tells
        printf 'data: %s\n\n' "$data"
        [[ $data == "[DONE]" ]] && exit 0
        last=$id tries=0 data= id=
        ;;
    esac
  done < <(curl -sN --speed-limit 1 --speed-time 60 "${GATEWAYS[turn % ${#GATEWAYS[@]}]}/v1/chat/completions" "${resume[@]}" \
    -H "$AUTHORIZATION" -H 'Content-Type: application/json' -H "Idempotency-Key: $KEY" -d "$BODY" && echo)
  echo "[${GATEWAYS[turn % ${#GATEWAYS[@]}]} is lost]" >&2
  tries=$((tries + 1))
  sleep 0.1
done
echo "No gateway answers." >&2
exit 1
