// Presets: what is kept of settings, applied, replaced, renamed, deleted.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as presets from "../../../../../services/gateway/api/console/static/chat/presets.js";

const SETTINGS = { system: "Be brief", temperature: "0.2", tools: "[]", background: "5" };

test("a preset has the parameters and the system prompt, and leaves the rest of a conversation's settings alone", () => {
  const [kept] = presets.withPreset([], "Brief", SETTINGS);
  assert.deepEqual(kept, { name: "Brief", settings: { system: "Be brief", temperature: "0.2" } });
  const now = { top_k: "5", temperature: "1", tools: "[1]" };
  assert.deepEqual(presets.applied(now, kept), { tools: "[1]", system: "Be brief", temperature: "0.2" });
});

test("which preset settings are is seen from what they say", () => {
  const kept = presets.withPreset(presets.withPreset([], "b", SETTINGS), "a", { temperature: "0.2", system: "Be brief" });
  assert.equal(presets.presetNamed(kept, SETTINGS, ""), "a");
  assert.equal(presets.presetNamed(kept, SETTINGS, "b"), "b");
  assert.equal(presets.presetNamed(kept, { ...SETTINGS, seed: "1" }, "b"), "");
});

test("a name is there once, and their number has a limit", () => {
  let kept = [];
  for (let index = 0; index < presets.LIMITS.presets; index += 1) kept = presets.withPreset(kept, `p${index}`, {});
  assert.throws(() => presets.withPreset(kept, "one more", {}), /100 presets are kept here/);
  kept = presets.withPreset(kept, "p7", { seed: "1" });
  assert.equal(kept.length, presets.LIMITS.presets);
  assert.deepEqual(kept.find((one) => one.name === "p7").settings, { seed: "1" });
  assert.throws(() => presets.renamedPreset(kept, "p7", "p8"), /There is a preset p8 already/);
  kept = presets.renamedPreset(kept, "p7", "z");
  assert.deepEqual([kept.at(-1), presets.withoutPreset(kept, "z").length], [{ name: "z", settings: { seed: "1" } }, 99]);
});

test("what was stored is read as far as it is presets", () => {
  for (const text of [null, "{", "5", "{}", '[1, null, {"name": 3}, {"name": " "}]']) assert.deepEqual(presets.presetsOf(text), []);
  const text = JSON.stringify([{ name: "x", settings: { seed: "1", tools: "[]", top_k: 5, other: "y" } }, { name: "a" }]);
  assert.deepEqual(presets.presetsOf(text), [{ name: "a", settings: {} }, { name: "x", settings: { seed: "1" } }]);
});
