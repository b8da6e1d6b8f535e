// Events of a stream, what they add to an answer, and figures over time.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EventParser, backoff, pace, passing, take } from "../../../../../services/gateway/api/console/static/app/stream.js";
import * as series from "../../../../../services/gateway/api/console/static/operator/series.js";

const TEXT = ": comment\n\nid: 7\ndata: {\"a\":\ndata: 1}\n\nevent: end\ndata:x\n\nid: 9\n\ndata: cut off";

test("events are the same however the text is cut", () => {
  const whole = [
    { data: '{"a":\n1}', id: "7", type: "message" },
    { data: "x", id: null, type: "end" },
  ];
  for (const text of [TEXT, TEXT.replaceAll("\n", "\r\n")]) {
    for (let size = 1; size <= text.length; size += 1) {
      const parser = new EventParser();
      const found = [];
      for (let at = 0; at < text.length; at += size) found.push(...parser.push(text.slice(at, at + size)));
      assert.deepEqual(found, whole, `pieces of ${size}`);
    }
  }
});

const answer = () => ({ text: "", revision: 0, pending: { key: "k", body: {}, id: null, last: null, began: 1000 } });
const event = (chunk, id = null) => ({ data: typeof chunk === "string" ? chunk : JSON.stringify(chunk), id });
const delta = (given, more = {}) => ({ id: "chatcmpl-1", choices: [{ delta: given, ...more }] });

test("an answer grows by text, reasoning and tool calls, and knows up to where", () => {
  const node = answer();
  assert.equal(take(node, event(delta({ role: "assistant" }), "1"), 1100), false);
  assert.equal(node.pending.first, undefined, "a role is no token");
  take(node, event(delta({ reasoning_content: "Well" }), "2"), 1500);
  take(node, event(delta({ content: "Yes" }), "3"), 1600);
  take(node, event(delta({ content: "!" }), "4"), 1700);
  const call = (index, id, name, text) => ({ tool_calls: [{ index, id, function: { name, arguments: text } }] });
  take(node, event(delta(call(0, "call_1", "f", ""))), 1800);
  take(node, event(delta(call(0, undefined, undefined, '{"x":'))), 1800);
  take(node, event(delta(call(0, undefined, undefined, "1}"), { finish_reason: "tool_calls" }), "5"), 1900);
  take(node, event({ id: "chatcmpl-1", choices: [], usage: { completion_tokens: 11 } }, "6"), 2500);
  assert.equal(take(node, event("[DONE]"), 2500), true);
  assert.deepEqual([node.text, node.reasoning, node.finish], ["Yes!", "Well", "tool_calls"]);
  assert.deepEqual(node.calls, [{ id: "call_1", name: "f", arguments: '{"x":1}' }]);
  assert.deepEqual([node.pending.id, node.pending.last, "body" in node.pending], ["chatcmpl-1", "6", false]);
  assert.deepEqual(pace(node, 2500), { first: 0.5, rate: 10, total: 1.5 });
  node.pending.away = true;
  assert.deepEqual(pace(node, 2500), { first: null, rate: null, total: 1.5 }, "nobody has measured it");
});

test("how much of a long prompt is read is known until text comes", () => {
  const node = answer();
  const progress = { total: 90, cache: 0, processed: 30, time_ms: 1500 };
  take(node, event({ ...delta({ role: "assistant", content: null }), prompt_progress: progress }), 1100);
  assert.deepEqual([node.pending.progress, node.pending.id, node.pending.last], [progress, "chatcmpl-1", null]);
  take(node, event(delta({ role: "assistant" }), "0"), 1200);
  assert.equal(node.pending.progress, null);
});

test("an error within a stream is told, and leaves the text as it was", () => {
  const node = answer();
  take(node, event(delta({ content: "Yes" }), "1"), 1);
  assert.throws(() => take(node, event({ error: { message: "No ring", code: "x" } }), 2), /No ring/);
  assert.deepEqual([node.text, node.pending.last], ["Yes", "1"]);
  assert.throws(() => take(node, event("{"), 2), SyntaxError);
});

test("what may pass is asked for again, ever more slowly", () => {
  assert.deepEqual([0, 503, 429, 404, 400].map((status) => passing(status, true)), [true, true, true, false, false]);
  assert.deepEqual([0, 503, 502, 429].map((status) => passing(status, false)), [true, false, true, false]);
  assert.deepEqual([0, 3, 20].map(backoff), [100, 800, 3000]);
});

test("tokens per second are of the generations that both looks know, and of new ones", () => {
  const look = (now, tokens, gateway = "g") => ({
    now,
    gateway,
    generations: Object.entries(tokens).map(([digest, count]) => ({ digest, tokens: count, created: digest === "new" ? now : 1 })),
  });
  assert.equal(series.rateBetween(look(10, { a: 5, b: 7 }), look(12, { new: 4, a: 15 })), 7);
  assert.equal(series.rateBetween(null, look(1, {})), null);
  assert.equal(series.rateBetween(look(1, { a: 1 }, "other"), look(2, { a: 9 })), null);
  assert.equal(series.rateBetween(look(2, {}), look(2, {})), null);
  assert.equal(series.ringRate({ running: 4, step_seconds: 0.02 }), 200);
  assert.equal(series.ringRate({ running: 4, step_seconds: 0 }), 0);
});

test("lines forget what is old, and the axis ends at a round number", () => {
  const lines = new series.Series();
  lines.add(0, { a: 1, gone: 2 });
  lines.add(series.SPAN, { a: 3 });
  assert.deepEqual(lines.lines().map((line) => [line.name, line.points.length]), [["a", 2], ["gone", 1]]);
  lines.add(series.SPAN + 1, Object.fromEntries([..."abcdefghijk"].map((name, index) => [name, index])));
  assert.equal(lines.lines().length, 8);
  assert.ok(lines.lines().every((line) => line.name > "c"), "the highest ones");
  assert.deepEqual([0, 1, 3, 5, 51, 1000, 0.3].map(series.ceiling), [1, 1, 5, 5, 100, 1000, 0.5]);
  assert.equal(series.polyline([{ at: 0, value: 0 }, { at: 300, value: 5 }], 300, 10, 300, 100), "0.0,100.0 300.0,50.0");
});
