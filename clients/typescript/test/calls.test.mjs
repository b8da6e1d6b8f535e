import assert from "node:assert/strict";
import { test } from "node:test";

import { ApiError, Client, textOf } from "../dist/index.js";
import { json, refuse, serve } from "./server.mjs";

async function served(t, answer) {
  const server = await serve(answer);
  t.after(() => server.close());
  return server;
}

test("a whole answer is repeated under its key", async (t) => {
  const server = await served(t, (request, response, number) => {
    if (number === 1) return response.destroy();
    if (number === 2) return refuse(response, 429, "queue_full");
    json(response, { choices: [{ message: { content: "Yes." } }] });
  });
  const answer = await new Client(server.url).chat({ model: "m", messages: [], stream: true });
  assert.equal(textOf(answer), "Yes.");
  assert.equal(server.requests.length, 3);
  assert.equal(new Set(server.requests.map((request) => request.headers["idempotency-key"])).size, 1);
  assert.equal(JSON.parse(server.requests[0].body).stream, false);
  assert.equal(server.requests[0].headers["content-type"], "application/json");
});

test("each endpoint has its call", async (t) => {
  const server = await served(t, (request, response) => {
    if (request.url === "/v1/models") return json(response, { data: [{ id: "a" }, { id: "b" }] });
    if (request.method === "DELETE") return json(response, { cancelled: true });
    if (request.url === "/v1/generations/cmpl-1") {
      const done = { choices: [{ text: "So far" }] };
      return json(response, { id: "cmpl-1", model: "m", status: "in_progress", position: 2, response: done, error: null });
    }
    const status = request.url.includes("/prefill") ? 202 : 200;
    json(response, { object: request.url, output: [{ type: "message", content: [{ text: "Yes." }] }] }, status);
  });
  const client = new Client(server.url);
  assert.equal((await client.completion({ model: "m", prompt: "x" })).object, "/v1/completions");
  assert.equal((await client.embeddings({ model: "m", input: "x" })).object, "/v1/embeddings");
  assert.equal((await client.rerank({ model: "m", query: "x", documents: ["a"], top_n: 1 })).object, "/v1/rerank");
  assert.equal((await client.score({ model: "m", queries: "x", documents: ["a", "b"] })).object, "/v1/score");
  assert.equal(textOf(await client.response({ model: "m", input: "x" })), "Yes.");
  assert.deepEqual(await client.models(), ["a", "b"]);
  const state = await client.state({ generation: "cmpl-1", position: "" });
  assert.deepEqual([state.status, state.over, state.text, state.position], ["in_progress", false, "So far", "2"]);
  assert.equal(await client.cancel("cmpl-1"), true);
  const prefilled = await client.prefill("a b", { model: "m", messages: [] }, { wait: 500 });
  assert.equal(prefilled.object, "/v1/sessions/a%20b/prefill?wait=0.5");
  assert.equal(await client.cancelPrefill("a b"), true);
});

test("what is no error of OpenAI's is told all the same", async (t) => {
  const server = await served(t, (request, response) => response.writeHead(403).end("[]"));
  await assert.rejects(new Client(server.url).models(), (error) => {
    assert.ok(error instanceof ApiError);
    assert.deepEqual([error.status, error.code, error.again], [403, "", false]);
    return true;
  });
});

test("what no header can have is told at once", async () => {
  const client = new Client("http://127.0.0.1:9");
  await assert.rejects(new Client("http://127.0.0.1:9", { apiKey: "a\nb" }).models(), TypeError);
  await assert.rejects(client.chat({ model: "m", messages: [] }, { idempotencyKey: "–" }), TypeError);
  await assert.rejects(client.streamChat({ model: "m", messages: [] }, { headers: { "a b": "c" } }).text(), TypeError);
});

test("what is no gateway is told before anything is sent", () => {
  for (const urls of [[], "", "127.0.0.1:8000", "http://", "http://a:x", ["http://a", "ftp://b"]]) {
    assert.throws(() => new Client(urls), { name: "TypeError", message: /http:\/\/HOST:8000/ });
  }
});
