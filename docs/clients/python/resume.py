"""A stream that survives its connection and its gateway; the standard library alone.

RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.
"""

import http.client
import itertools
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid

GATEWAYS = os.environ.get("RYZANSTEIN_URL", "http://127.0.0.1:8000").split(",")
API_KEY = os.environ.get("RYZANSTEIN_API_KEY", "none")
LOST = (urllib.error.URLError, http.client.HTTPException, OSError)  # none of them is an answer
TRIES = 20  # in a row without anything new


def events(answer):
    """Yields (data, id) of each event; one counts when the blank line behind it is there."""
    data = identity = ""
    for line in answer:
        field, _, value = line.decode().rstrip("\r\n").partition(": ")
        if field == "data":
            data = value
        elif field == "id":
            identity = value
        elif not field and data:
            yield data, identity
            data = identity = ""


def request(gateway, path, body=None, headers=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"} | (headers or {})
    return urllib.request.urlopen(urllib.request.Request(gateway + path, data, headers), timeout=60)


def stream(body):
    """Yields the text. The same request under the same key is the same generation, at every gateway."""
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    tries = 0
    for gateway in itertools.cycle(GATEWAYS):
        try:
            with request(gateway, "/v1/chat/completions", body, headers) as answer:
                for data, identity in events(answer):
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:  # of this gateway, or the end: the next try tells
                        raise ConnectionError(chunk["error"]["message"])
                    headers["Last-Event-ID"] = identity
                    tries = 0
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""
        except urllib.error.HTTPError as error:
            if error.code not in (429, 502, 503):
                raise SystemExit(error.read().decode()) from None
        except LOST as error:
            print(f"\n[{gateway} is lost: {error}]", file=sys.stderr)
        tries += 1
        if tries > TRIES:
            raise SystemExit("No gateway answers.")
        time.sleep(min(1, 0.05 * tries))


with request(GATEWAYS[0], "/v1/models") as answer:
    model = json.load(answer)["data"][0]["id"]
question = {"role": "user", "content": "Tell me a story."}
for text in stream({"model": model, "messages": [question], "max_tokens": 200, "stream": True}):
    print(text, end="", flush=True)
print()
