#!/usr/bin/env bash
# A chat, streamed: the events as they are.
set -euo pipefail
URL=${RYZANSTEIN_URL:-http://127.0.0.1:8000}
AUTHORIZATION="Authorization: Bearer ${RYZANSTEIN_API_KEY:-none}"
MODEL=$(curl -sSf "$URL/v1/models" -H "$AUTHORIZATION" | grep -o '"id": *"[^"]*"' | head -1 | cut -d'"' -f4)
curl -sSN --fail-with-body "$URL/v1/chat/completions" -H "$AUTHORIZATION" -H 'Content-Type: application/json' \
  -d '{"model": "'"$MODEL"'", "stream": true, "max_tokens": 200, "messages": [{"role": "user", "content": "Tell me a story."}]}'
