import assert from "node:assert/strict";
import { once } from "node:events";
import { test } from "node:test";

import { ApiError, Client, LostConnection } from "../dist/index.js";
import { beginEvents, chatEvent, chatEvents, json, refuse, serve } from "./server.mjs";

const TEXT = "A cursor – ok.";
const CHAT = { model: "m", messages: [{ role: "user", content: "Hi" }] };

async function served(t, answer) {
  const server = await serve(answer);
  t.after(() => server.close());
  return server;
}

test("wherever a connection is cut, each piece comes once, in order", async (t) => {
  const whole = chatEvents({ headers: {} }, TEXT);
  for (let cut = 0; cut < whole.length; cut += 59) {
    const server = await served(t, (request, response, number) => {
      beginEvents(response);
      const data = Buffer.from(chatEvents(request, TEXT));
      if (number === 1) response.write(data.subarray(0, cut), () => response.destroy());
      else response.end(data);
    });
    const pieces = [];
    for await (const piece of new Client(server.url).streamChat(CHAT)) pieces.push(piece);
    assert.equal(pieces.map((piece) => piece.text).join(""), TEXT);
    assert.deepEqual(pieces.map((piece) => Number(piece.position)), pieces.map((_, index) => index + 1));
    assert.equal(pieces.at(-1).finishReason, "stop");
    const [first, second] = server.requests;
    assert.deepEqual([first.method, first.url], ["POST", "/v1/chat/completions"]);
    assert.match(first.headers["idempotency-key"], /^[0-9a-f]{32}$/);
    assert.equal(JSON.parse(first.body).stream, true);
    if (second.method === "POST") {
      assert.equal(second.headers["idempotency-key"], first.headers["idempotency-key"]);
      assert.equal(second.body, first.body);
    } else {
      assert.equal(second.url, "/v1/generations/chatcmpl-1/stream");
    }
    assert.equal(server.requests.length, 2);
  }
});

test("another gateway goes on, and one that is away costs nothing", async (t) => {
  const first = await served(t, (request, response) => {
    beginEvents(response);
    response.write(chatEvent(TEXT, 1) + chatEvent(TEXT, 2), () => response.destroy());
  });
  const second = await served(t, (request, response) => {
    beginEvents(response);
    response.end(chatEvents(request, TEXT));
  });
  const client = new Client(["http://127.0.0.1:9", `${first.url}/v1/`, second.url], { apiKey: "secret" });
  const stream = client.streamChat(CHAT, { idempotencyKey: "mine", background: 1500, headers: { "X-Session-ID": "s" } });
  assert.equal(stream.cursor, null);
  assert.equal(await stream.text(), TEXT);
  assert.deepEqual(stream.cursor, { generation: "chatcmpl-1", position: String(TEXT.length + 1) });
  const asked = first.requests[0].headers;
  assert.deepEqual(
    [asked["idempotency-key"], asked["x-ryzanstein-background"], asked["x-session-id"], asked.authorization],
    ["mine", "1.5", "s", "Bearer secret"],
  );
  assert.deepEqual(second.requests.map((request) => request.headers["last-event-id"]), ["2"]);
});

test("a refusal for now is tried again, after the time that it names", async (t) => {
  const server = await served(t, (request, response, number) => {
    if (number === 1) return refuse(response, 503, "unavailable", { "retry-after": "0" });
    if (number === 2) return response.writeHead(502).end("<html>Bad gateway</html>");
    beginEvents(response);
    if (number === 3) response.end(`data: {"error": {"message": "Stopping.", "code": "unavailable"}}\n\n`);
    else response.end(chatEvents(request, TEXT));
  });
  assert.equal(await new Client(server.url).streamCompletion({ model: "m", prompt: "x" }).text(), TEXT);
  assert.equal(server.requests.length, 4);
  assert.equal(new Set(server.requests.map((request) => request.headers["idempotency-key"])).size, 1);
});

test("a refusal for good is told at once, with OpenAI's fields", async (t) => {
  const server = await served(t, (request, response) =>
    json(
      response,
      { error: { message: "No.", type: "invalid_request_error", param: "model", code: "model_not_found" } },
      404,
      { "x-request-id": "r-1" },
    ),
  );
  await assert.rejects(new Client(server.url).streamChat(CHAT).text(), (error) => {
    assert.ok(error instanceof ApiError);
    const { message, status, type, param, code, requestId, again } = error;
    assert.deepEqual(
      { message, status, type, param, code, requestId, again },
      {
        message: "No.",
        status: 404,
        type: "invalid_request_error",
        param: "model",
        code: "model_not_found",
        requestId: "r-1",
        again: false,
      },
    );
    return true;
  });
  assert.equal(server.requests.length, 1);
});

test("a generation that was cancelled is not tried for ever", async (t) => {
  const server = await served(t, (request, response) => {
    if (request.url.endsWith("/stream")) return refuse(response, 503, "unavailable");
    if (request.method === "GET") return json(response, { id: "chatcmpl-1", model: "m", status: "cancelled" });
    beginEvents(response);
    response.end(chatEvent(TEXT, 1) + `data: {"error": {"message": "Gone.", "code": "unavailable"}}\n\n`);
  });
  await assert.rejects(new Client(server.url).streamChat(CHAT).text(), { name: "ApiError", status: 503, again: false });
});

test("with nobody there, patience ends", async (t) => {
  const client = new Client("http://127.0.0.1:9", { patience: 100 });
  await assert.rejects(client.streamChat(CHAT).text(), LostConnection);
  await assert.rejects(client.state("chatcmpl-1"), LostConnection);
  const silent = await served(t, () => {});
  const hasty = new Client(silent.url, { timeout: 20, patience: 100 });
  await assert.rejects(hasty.streamChat(CHAT).text(), /Nothing came for 20 ms/);
});

test("a signal ends a stream, whatever it waits for", async (t) => {
  let closed;
  const server = await served(t, (request, response) => {
    closed = once(response, "close");
    beginEvents(response);
    response.write(chatEvent(TEXT, 1));
  });
  const controller = new AbortController();
  const stream = new Client(server.url).streamChat(CHAT, { signal: controller.signal });
  await assert.rejects(
    async () => {
      for await (const piece of stream) if (piece.text) controller.abort();
    },
    { name: "AbortError" },
  );
  await closed;
  const away = new Client("http://127.0.0.1:9");
  await assert.rejects(away.streamChat(CHAT, { signal: AbortSignal.timeout(30) }).text(), { name: "TimeoutError" });
  await assert.rejects(away.state("x", AbortSignal.timeout(30)), { name: "TimeoutError" });
  assert.equal(server.requests.length, 1);
});

test("who leaves early lets go", async (t) => {
  const closed = [];
  const server = await served(t, (request, response) => {
    closed.push(once(response, "close"));
    beginEvents(response);
    response.write(chatEvent(TEXT, 1));
  });
  const client = new Client(server.url);
  for await (const piece of client.streamChat(CHAT)) if (piece.text) break;
  const stream = client.streamChat(CHAT);
  const reading = stream.text(); // waits for the second character when the stream is closed
  while (stream.cursor === null) await new Promise(setImmediate);
  await stream.close();
  assert.equal(await reading, TEXT[0]);
  assert.deepEqual(await client.startChat(CHAT), { generation: "chatcmpl-1", position: "" });
  await Promise.all(closed);
  assert.equal(server.requests[2].headers["x-ryzanstein-background"], "600");
});

test("attach reads on from a cursor, or from a position", async (t) => {
  const server = await served(t, (request, response) => {
    beginEvents(response);
    response.end(chatEvents(request, TEXT));
  });
  const client = new Client(server.url);
  const cursor = JSON.parse(JSON.stringify({ generation: "chatcmpl-1", position: "7" }));
  assert.equal(await client.attach(cursor).text(), TEXT.slice(7));
  assert.equal(await client.attach("chatcmpl-1").text(), TEXT);
  assert.equal(await client.attach("chatcmpl-1", { after: "9" }).text(), TEXT.slice(9));
});

test("a response is read on by the numbers of its events", async (t) => {
  const all = [
    { type: "response.created", response: { id: "resp_1", status: "in_progress" } },
    ...Array.from("Yes.", (delta) => ({ type: "response.output_text.delta", delta })),
    { type: "response.completed", response: { id: "resp_1", status: "completed" } },
  ];
  const server = await served(t, (request, response, number) => {
    const after = Number(request.headers["last-event-id"] ?? -1);
    beginEvents(response);
    const left = all.map((event, id) => `event: ${event.type}\ndata: ${JSON.stringify(event)}\nid: ${id}\n\n`);
    if (number === 1) response.write(left.slice(0, 3).join(""), () => response.destroy());
    else response.end(left.slice(after + 1).join(""));
  });
  const pieces = [];
  for await (const piece of new Client(server.url).streamResponse({ model: "m", input: "x" })) pieces.push(piece);
  assert.deepEqual(pieces.map((piece) => piece.chunk), all);
  assert.equal(pieces.map((piece) => piece.text).join(""), "Yes.");
  assert.equal(pieces.at(-1).finishReason, "completed");
  assert.equal(server.requests[1].url, "/v1/generations/resp_1/stream");
});

test("a response that has failed says why", async (t) => {
  const server = await served(t, (request, response) => {
    beginEvents(response);
    const failed = { type: "response.failed", response: { id: "resp_1", error: { code: "server_error", message: "Lost." } } };
    response.end(`data: ${JSON.stringify(failed)}\nid: 0\n\n`);
  });
  await assert.rejects(new Client(server.url).streamResponse({ model: "m", input: "x" }).text(), {
    name: "ApiError",
    message: "Lost.",
    code: "server_error",
  });
  assert.equal(server.requests.length, 1);
});
