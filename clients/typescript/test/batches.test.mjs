import assert from "node:assert/strict";
import { test } from "node:test";

import { Client } from "../dist/index.js";
import { json, serve } from "./server.mjs";

const LINES = [{ custom_id: "a", body: { n: 1 } }, { custom_id: "b", body: { n: 2 } }];

/** A server with files and batches; the second download is the first that is whole. */
async function batchServer(t) {
  const files = [];
  let looks = 0;
  let downloads = 0;
  const batch = (status, done) => ({
    id: "batch_1",
    status,
    request_counts: { total: 2, completed: done, failed: 0 },
    output_file_id: "file-out",
    errors: { data: [{ line: 3, message: "No JSON." }, { message: "Odd." }] },
  });
  const server = await serve((request, response) => {
    const { pathname } = new URL(request.url, "http://x");
    if (pathname === "/v1/files" && request.method === "GET") return json(response, { data: files, has_more: false });
    if (pathname === "/v1/files") {
      const filename = /filename="([^"]+)"/.exec(request.body)[1];
      const bytes = Buffer.byteLength(LINES.map((line) => `${JSON.stringify(line)}\n`).join(""));
      files.push({ id: `file-${files.length}`, filename, bytes });
      return json(response, files.at(-1));
    }
    if (pathname === "/v1/batches") return json(response, batch("validating", 0));
    if (pathname === "/v1/batches/batch_1") return json(response, batch((looks += 1) > 3 ? "completed" : "in_progress", 2));
    const data = LINES.map((line) => JSON.stringify(line)).join("\n");
    response.writeHead(200, { "content-length": data.length });
    if ((downloads += 1) === 1) response.write(data.slice(0, data.indexOf("\n") + 4), () => response.destroy());
    else response.end(data);
  });
  t.after(() => server.close());
  return server;
}

test("requests go in, results come out", async (t) => {
  const server = await batchServer(t);
  const { batches } = new Client(server.url);
  const submitted = await batches.submit(LINES, { window: "2h", metadata: { run: "7" } });
  const created = server.requests.find((request) => request.url === "/v1/batches");
  assert.deepEqual(JSON.parse(created.body), {
    input_file_id: "file-0",
    endpoint: "/v1/chat/completions",
    completion_window: "2h",
    metadata: { run: "7" },
  });
  assert.match(server.requests[0].body, /\{"custom_id":"a","body":\{"n":1\}\}\n\{"custom_id":"b"/);
  const seen = [];
  const batch = await batches.wait(submitted.id, { interval: 1, progress: (each) => seen.push(each.status) });
  assert.deepEqual(seen, ["in_progress", "completed"]);
  assert.deepEqual([batch.over, batch.total, batch.completed, batch.failed], [true, 2, 2, 0]);
  assert.deepEqual(batch.errors, ["line 3: No JSON.", "Odd."]);
  const found = [];
  for await (const line of batches.results(batch)) found.push(line);
  assert.deepEqual(found, LINES);
  for await (const line of batches.results(batch, "errors")) assert.fail(JSON.stringify(line));
});

test("who begins again with the same key uploads nothing twice", async (t) => {
  const server = await batchServer(t);
  for (let run = 0; run < 2; run += 1) {
    await new Client(server.url).batches.submit(LINES, { idempotencyKey: "nightly/1" });
  }
  const uploads = server.requests.filter((request) => request.method === "POST" && request.url === "/v1/files");
  assert.equal(uploads.length, 1);
  const created = server.requests.filter((request) => request.url === "/v1/batches");
  assert.deepEqual(created.map((request) => request.headers["idempotency-key"]), ["nightly/1", "nightly/1"]);
  assert.equal(created[0].body, created[1].body);
});
