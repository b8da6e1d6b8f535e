// Fine-tuning: what events tell, the lines that are drawn of it, and what a form asks for.
import assert from "node:assert/strict";
import { test } from "node:test";
import { LIMITS, Run, axis, figuresOf, nearest, polyline, thinned } from "../../../../../services/gateway/api/console/static/tuning/run.js";
import { faultOf, requestOf } from "../../../../../services/gateway/api/console/static/tuning/request.js";

const metrics = (id, data) => ({ id, type: "metrics", created_at: 1, level: "info", message: "", data });
const message = (id, at, text = id) => ({ id, type: "message", created_at: at, level: "info", message: text });

test("figures come once a step, in OpenAI's names, in whichever order and however often they are read", () => {
  const run = new Run();
  const both = metrics("b", { step: 2, train_loss: 1.5, train_mean_token_accuracy: 0.5, full_valid_loss: 1.75, valid_loss: 9 });
  for (const event of [both, metrics("a", { step: 1, train_loss: 2 }), both]) run.add(event);
  assert.deepEqual(run.points("trainLoss"), [{ step: 1, value: 2 }, { step: 2, value: 1.5 }]);
  assert.deepEqual(run.points("validLoss"), [{ step: 2, value: 1.75 }], "over the whole file, where it is known");
  assert.deepEqual(run.points("trainAccuracy"), [{ step: 2, value: 0.5 }]);
  run.add(metrics("c", { step: 1, valid_loss: 3 }));
  assert.deepEqual(run.points("trainLoss")[0], { step: 1, value: 2 }, "what was known stays");
  assert.deepEqual(run.points("validLoss")[0], { step: 1, value: 3 });
});

test("what is no figure is none", () => {
  for (const data of [undefined, {}, { step: "1" }, { step: -1 }, { step: NaN }]) assert.equal(figuresOf(data), null);
  assert.equal(figuresOf({ step: 1, train_loss: "<b>", grad_norm: Infinity }).trainLoss, null);
  const run = new Run();
  for (const event of [null, {}, { id: 3 }, metrics("odd", null)]) run.add(event);
  assert.equal(run.messages.length, 1, "an event without figures is a message");
});

test("messages are in the order of their time, and only the newest are kept", () => {
  const run = new Run();
  run.add(message("c", 30));
  run.add(message("a", 10));
  for (const event of [message("b", 10), message("b", 10)]) run.add(event);
  assert.deepEqual(run.messages.map((one) => one.id), ["a", "b", "c"]);
  for (let at = 0; at < LIMITS.messages + 5; at += 1) run.add(message(`m${at}`, 100 + at));
  assert.equal(run.messages.length, LIMITS.messages);
  assert.equal(run.messages.at(-1).id, `m${LIMITS.messages + 4}`);
});

test("only the newest steps are kept, and a long line is drawn of means", () => {
  const run = new Run();
  for (let step = 1; step <= LIMITS.steps + 3; step += 1) run.add(metrics(`s${step}`, { step, train_loss: step % 2 }));
  assert.equal(run.steps.length, LIMITS.steps);
  assert.equal(run.steps[0].step, 4);
  const line = thinned(run.points("trainLoss"));
  assert.ok(line.length <= LIMITS.points);
  assert.ok(line.every(({ value }) => Math.abs(value - 0.5) < 0.03));
  const few = [{ step: 1, value: 1 }];
  assert.equal(thinned(few), few);
});

test("an axis is round, holds all values, and begins with 0 where they come near it", () => {
  assert.deepEqual(axis([]), { low: 0, high: 1 });
  assert.deepEqual(axis([0.3, 2.6]), { low: 0, high: 3 });
  assert.deepEqual(axis([2, 2.1]).low, 2);
  for (const values of [[0], [5], [-3, 4], [0.69, 0.69], [1e-9, 3e-9], [1e9], [1.1, 1.9, 1.3]]) {
    const { low, high } = axis(values);
    assert.ok(low <= Math.min(...values) + 1e-12 && high >= Math.max(...values) - 1e-12 && high > low, `${values}`);
  }
});

test("a line goes from the first step to the last, and the nearest point is found", () => {
  const points = [{ step: 1, value: 0 }, { step: 3, value: 1 }, { step: 5, value: 2 }];
  assert.equal(polyline(points, 5, { low: 0, high: 2 }, 100, 50), "0.0,50.0 50.0,25.0 100.0,0.0");
  assert.equal(polyline(points.slice(0, 1), 1, { low: 0, high: 2 }, 100, 50), "50.0,50.0");
  assert.equal(polyline([], 5, { low: 0, high: 2 }, 100, 50), "");
  assert.deepEqual([0, 0.4, 1].map((share) => nearest(points, 5, share).step), [1, 3, 5]);
  assert.equal(nearest([], 5, 0.5), null);
});

test("a form asks for what was filled in alone", () => {
  const given = { model: "m", method: "supervised", suffix: " ", n_epochs: "", beta: "0.1", rank: "", target_modules: "" };
  assert.deepEqual(requestOf(given, { training: "file-1", validation: null }), {
    model: "m",
    training_file: "file-1",
    method: { type: "supervised", supervised: { hyperparameters: {} } },
  });
  const all = { ...given, method: "dpo", suffix: "mine", n_epochs: "2", rank: "8", target_modules: "q_proj, v_proj", seed: "0", schedule: "linear", truncate: "on" };
  assert.deepEqual(requestOf(all, { training: "file-1", validation: "file-2" }), {
    model: "m",
    training_file: "file-1",
    validation_file: "file-2",
    method: { type: "dpo", dpo: { hyperparameters: { n_epochs: 2, beta: 0.1 } } },
    suffix: "mine",
    lora: { rank: 8, target_modules: ["q_proj", "v_proj"] },
    seed: 0,
    schedule: "linear",
    truncate: true,
  });
});

test("what cannot be sent is told by the field's name", () => {
  const files = { training: "file-1", validation: null };
  assert.throws(() => requestOf({ model: "" }, files), /Choose the model/);
  assert.throws(() => requestOf({ model: "m", n_epochs: "many" }, files), /^RangeError: Epochs is no number: many$/);
  assert.match(faultOf(undefined, "training file"), /^Choose the training file/);
  assert.equal(faultOf({ name: "a.jsonl", size: 0 }, "training file"), "a.jsonl is empty.");
  assert.equal(faultOf({ name: "a.jsonl", size: 1 }, "training file"), "");
});
