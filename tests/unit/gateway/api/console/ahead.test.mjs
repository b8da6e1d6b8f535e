// Prefill ahead: asked once for each state of a conversation, and no more where it is refused.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Refusal } from "../../../../../services/gateway/api/console/static/app/api.js";
import { Ahead } from "../../../../../services/gateway/api/console/static/chat/ahead.js";

const MODELS = [
  { id: "m", status: { state: "loaded" } },
  { id: "asleep", status: { state: "sleeping" } },
  { id: "tuned", parent: "m", status: { state: "loaded" } },
];
const talk = (leaf, settings = {}) => ({ id: "c 1", leaf, settings });
const body = () => ({ model: "m" });

function made(answer = async () => {}) {
  const sent = [];
  const ahead = new Ahead(async (...asked) => {
    sent.push(asked);
    return answer();
  });
  ahead.knows(MODELS);
  return { ahead, sent };
}

test("each state of a conversation is prepared once", async () => {
  const { ahead, sent } = made();
  await ahead.prepare(talk("a1"), "m", body);
  await ahead.prepare(talk("a1"), "m", body);
  assert.deepEqual(sent, [["v1/sessions/c%201/prefill?wait=0", "POST", { model: "m" }]]);
  await ahead.prepare(talk("a2"), "m", body);
  await ahead.prepare(talk("a2", { system: "Be brief." }), "m", body);
  await ahead.prepare(talk("a2", { system: "Be brief." }), "tuned", body);
  assert.equal(sent.length, 4);
});

test("nothing is asked of models that are not loaded, of empty conversations, or where it is off", async () => {
  const { ahead, sent } = made();
  await ahead.prepare(talk("a1"), "asleep", body);
  await ahead.prepare(talk("a1"), "unknown", body);
  await ahead.prepare(talk(null), "m", body);
  await ahead.prepare(talk("a1", { ahead: "off" }), "m", body);
  assert.deepEqual(sent, []);
});

test("a gateway that will not is asked no more, one that cannot now is", async () => {
  for (const [status, more] of [[403, 1], [404, 1], [503, 2], [429, 2]]) {
    const { ahead, sent } = made(async () => {
      throw new Refusal(status, "no");
    });
    await ahead.prepare(talk("a1"), "m", body);
    await ahead.prepare(talk("a2"), "m", body);
    assert.equal(sent.length, more, String(status));
  }
});

test("what is wrong with a request is told when it is sent", async () => {
  const { ahead, sent } = made();
  await ahead.prepare(talk("a1"), "m", () => {
    throw new RangeError("temperature is no number");
  });
  assert.deepEqual(sent, []);
});
