// Conversations: branches, what the model is sent, merging of two tabs, files in and out.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as tree from "../../../../../services/gateway/api/console/static/chat/conversation.js";
import { fileName, fromJson, importWords, toJson, toMarkdown } from "../../../../../services/gateway/api/console/static/chat/transfer.js";
import * as settings from "../../../../../services/gateway/api/console/static/chat/settings.js";

function talk() {
  const made = tree.create("c1", 1, { system: " Be brief. " });
  tree.add(made, null, { id: "u1", role: "user", text: "Hi\nthere", at: 2 });
  tree.add(made, "u1", { id: "a1", role: "assistant", text: "Hello", at: 3, model: "m" });
  return made;
}

test("a path leads from the beginning to the leaf, and branches are siblings", () => {
  const made = talk();
  assert.equal(made.title, "Hi");
  tree.add(made, "u1", { id: "a2", role: "assistant", text: "Good day", at: 4 });
  assert.deepEqual(tree.path(made).map((node) => node.id), ["u1", "a2"]);
  assert.deepEqual(tree.siblings(made, made.nodes.a1).map((node) => node.id), ["a1", "a2"]);
  tree.add(made, "a1", { id: "u2", role: "user", text: "And?", at: 5 });
  tree.choose(made, made.nodes.a2);
  assert.equal(made.leaf, "a2");
  tree.choose(made, made.nodes.a1);
  assert.equal(made.leaf, "u2", "down to what came last in the branch");
});

test("the model is sent the system prompt, files before the text, calls and their results", () => {
  const made = talk();
  tree.add(made, "a1", { id: "u2", role: "user", text: "Read", at: 4, files: [{ name: "a.md", text: "```\nx\n```" }] });
  const calls = [{ id: "call_1", name: "f", arguments: "{}" }];
  tree.add(made, "u2", { id: "a2", role: "assistant", text: "", at: 5, calls });
  tree.add(made, "a2", { id: "t1", role: "tool", at: 6, results: [{ id: "call_1", text: "42" }] });
  const sent = tree.messages(made);
  assert.deepEqual(sent.map((message) => message.role), ["system", "user", "assistant", "user", "assistant", "tool"]);
  assert.equal(sent[0].content, "Be brief.");
  assert.equal(sent[3].content, "File a.md:\n````\n```\nx\n```\n````\n\nRead");
  assert.deepEqual(sent[4].tool_calls[0].function, { name: "f", arguments: "{}" });
  assert.deepEqual(sent[5], { role: "tool", tool_call_id: "call_1", content: "42" });
  assert.deepEqual(tree.messages(made, "u1").map((message) => message.role), ["system", "user"]);
});

test("what two tabs have of one conversation is united, each message in its newer state", () => {
  const [one, other] = [talk(), talk()];
  Object.assign(one.nodes.a1, { text: "Hello, old", revision: 1 });
  Object.assign(other.nodes.a1, { text: "Hello, newer", revision: 2 });
  tree.add(one, "a1", { id: "u2", role: "user", text: "From one", at: 6 });
  tree.add(other, "a1", { id: "u3", role: "user", text: "From the other", at: 5 });
  for (const [stored, mine] of [[one, other], [other, one]]) {
    const both = tree.merge(stored, mine);
    assert.deepEqual(Object.keys(both.nodes).sort(), ["a1", "u1", "u2", "u3"]);
    assert.equal(both.nodes.a1.text, "Hello, newer");
    assert.equal(both.leaf, mine.leaf, "each tab shows its own branch");
    assert.equal(both.updated, 6);
  }
});

test("limits are told, and nothing is added beyond them", () => {
  const made = talk();
  const long = "x".repeat(tree.LIMITS.text);
  assert.throws(() => tree.add(made, "a1", { id: "u2", role: "user", text: long, at: 4 }), /at most 8 Mi characters/);
  assert.deepEqual([Object.keys(made.nodes).length, made.leaf], [2, "a1"]);
  for (let index = 0; index < tree.LIMITS.nodes - 2; index += 1) made.nodes[`n${index}`] = { id: `n${index}`, text: "" };
  assert.throws(() => tree.add(made, "a1", { id: "u2", role: "user", text: "x", at: 4 }), /at most 5000 messages/);
});

test("words are searched in titles and in every branch", () => {
  const made = talk();
  for (const [query, found] of [["hello", true], ["THERE hi", true], ["hello absent", false], ["", true]]) {
    assert.equal(tree.matches(made, query), found, query);
  }
});

test("a file gives back what was written to it, without what was under way", () => {
  const made = talk();
  made.nodes.a1.pending = { id: "chatcmpl-1", last: "3" };
  const [back] = fromJson(toJson([made])).conversations;
  assert.equal(back.nodes.a1.pending, null);
  assert.deepEqual({ ...back, nodes: null }, { ...made, nodes: null });
  assert.deepEqual(tree.path(back).map((node) => node.text), ["Hi\nthere", "Hello"]);
  assert.match(toMarkdown(made), /^# Hi\n\n## System\n\nBe brief\.\n\n## You\n\nHi\nthere\n\n## Assistant \(m\)\n\nHello\n$/);
  assert.equal(fileName("Über/../x: y?", "md"), "Uberx-y.md");
  assert.equal(fileName("…", "json"), "conversation.json");
});

test("files of another kind are refused", () => {
  const file = JSON.parse(toJson([talk()]));
  for (const [text, words] of [
    ["{", /not JSON/],
    ["[]", /no conversations/],
    [JSON.stringify({ ...file, version: 2 }), /version 2/],
  ]) {
    assert.throws(() => fromJson(text), words);
  }
});

test("conversations that are not whole are left out, with what is wrong", () => {
  const broken = [
    [(file) => change(file, (one) => delete one.title), /^conversation 1 of the file: a title/],
    [(file) => change(file, (one) => (one.nodes.a1.role = "system")), /a1: its role/],
    [(file) => change(file, (one) => (one.nodes.a1.parent = "gone")), /the message before it is missing/],
    [(file) => change(file, (one) => (one.nodes.u1.parent = "a1")), /circle/],
    [(file) => change(file, (one) => (one.leaf = "gone")), /message that is shown/],
    [(file) => change(file, (one) => (one.nodes.u1.text = { toString: 1 })), /its text or its time/],
    [(file) => change(file, (one) => (one.nodes.u1.files = [{ name: "x" }])), /a file has no name/],
    [(file) => change(file, (one) => (one.nodes.a1.calls = [null])), /a tool call is not whole/],
    [(file) => change(file, (one) => (one.id = "<b>")), /no id/],
  ];
  for (const [spoil, words] of broken) {
    const file = JSON.parse(toJson([talk(), { ...talk(), id: "c2" }]));
    const { conversations, wrong } = fromJson(spoil(file));
    assert.deepEqual([conversations.map((one) => one.id), wrong.length], [["c2"], 1]);
    assert.match(wrong[0], words);
  }
});

test("what has come of a file is one sentence", () => {
  const said = (added, changed, same, ...wrong) => importWords("f.json", { added, changed, same }, wrong);
  assert.equal(said(1, 0, 0), "f.json: 1 conversation imported.");
  assert.equal(
    said(2, 1, 3, "conversation 1 of the file: it is too long", "conversation 2 of the file: it is too long"),
    "f.json: 2 conversations imported, 1 merged into the one here, 3 skipped since they are here already, " +
      "2 left out (conversation 1 of the file: it is too long, for example).",
  );
});

test("a conversation from a file is news where it has a message that is not here, or is newer", () => {
  const [here, file] = [talk(), talk()];
  assert.equal(tree.isNews(here, file), false);
  tree.add(here, "a1", { id: "u2", role: "user", text: "More", at: 9 });
  assert.deepEqual([tree.isNews(here, file), tree.isNews(file, here)], [false, true]);
  file.nodes.a1.revision = 1;
  assert.equal(tree.isNews(here, file), true);
});

function change(file, act) {
  act(file.conversations[0]);
  return JSON.stringify(file);
}

test("settings become a request, or are refused in words", () => {
  const given = { temperature: "0.5", max_tokens: "7", tools: '[{"name": "f"}]', reasoning_effort: "low" };
  const body = settings.requestOf(given, "m", [], { continued: true });
  assert.deepEqual(
    [body.temperature, body.max_tokens, body.tools, body.reasoning_effort, "seed" in body],
    [0.5, 7, [{ type: "function", function: { name: "f" } }], "low", false],
  );
  assert.deepEqual([body.continue_final_message, body.add_generation_prompt], [true, false]);
  assert.throws(() => settings.requestOf({ seed: "x" }, "m", []), /seed is no number: x/);
  assert.throws(() => settings.requestOf({ tools: "{" }, "m", []), /tools are not JSON/);
  assert.throws(() => settings.requestOf({ tools: "{}" }, "m", []), /JSON array/);
  assert.deepEqual([settings.backgroundOf({}), settings.backgroundOf({ background: "5" })], ["60", "5"]);
  assert.throws(() => settings.backgroundOf({ background: "-1" }), /a number from 0 on/);
  assert.deepEqual(settings.only({ system: "x", other: "y", seed: 5 }), { system: "x" });
});
