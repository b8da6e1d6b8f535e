// Conversations as files: JSON for other browsers, Markdown for people. Pure.

import { LIMITS, fence, path, problem } from "./conversation.js";
import { only } from "./settings.js";

const FORMAT = "ryzanstein-conversations";
const VERSION = 1;
const NAMES = { user: "You", assistant: "Assistant", tool: "Tool results" };

/** All branches of these, as JSON. */
export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: conversations.map(settled) }, null, 1);
}

/** The conversations of a file, and in words what is wrong with each that cannot be read: {conversations, wrong}. Throws
 * `RangeError` where the file is none of ours. */
export function fromJson(text) {
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    throw new RangeError("The file is not JSON; choose one that was exported here.");
  }
  if (content?.format !== FORMAT || !Array.isArray(content.conversations)) {
    throw new RangeError("The file has no conversations; choose one that was exported here.");
  }
  if (content.version !== VERSION) {
    throw new RangeError(`The file has version ${JSON.stringify(content.version)} of its format; this page reads ${VERSION}.`);
  }
  if (content.conversations.length > LIMITS.conversations) {
    throw new RangeError(`The file has more than ${LIMITS.conversations} conversations.`);
  }
  const problems = content.conversations.map(problem);
  const wrong = problems.flatMap((words, index) => (words ? [`conversation ${index + 1} of the file: ${words}`] : []));
  return { conversations: content.conversations.filter((_, index) => !problems[index]).map(settled), wrong };
}

/** What has come of a file, in one sentence. `counts`: conversations that were `added`, `changed` (they were here, and got
 * messages), or the `same` as here; `wrong`: why each of the others was left out. */
export function importWords(name, { added, changed, same }, wrong) {
  const many = (count, rest) => `${count} conversation${count === 1 ? "" : "s"} ${rest}`;
  const parts = [many(added, "imported")];
  if (changed) parts.push(`${changed} merged into ${changed === 1 ? "the one" : "those"} here`);
  if (same) parts.push(`${same} skipped since ${same === 1 ? "it is" : "they are"} here already`);
  if (wrong.length) parts.push(`${wrong.length} left out (${wrong[0]}${wrong.length > 1 ? ", for example" : ""})`);
  return `${name}: ${parts.join(", ")}.`;
}

/** What is known of a conversation, without what only the browser that wrote it could go on with. */
function settled({ id, title, named, created, updated, leaf, settings, nodes }) {
  const known = Object.entries(nodes).map(([key, node]) => [key, settledNode(node)]);
  const kept = { id, title, named: named === true, created, updated, leaf, settings: only(settings) };
  return { ...kept, nodes: Object.fromEntries(known) };
}

function settledNode(node) {
  const { id, parent, role, text, at, reasoning, files, calls, results, usage } = node;
  const kept = { id, parent, role, text, at, pending: null };
  Object.assign(kept, { reasoning, files, calls, results });
  kept.revision = Number.isFinite(node.revision) ? node.revision : 0;
  for (const name of ["model", "finish", "error"]) if (typeof node[name] === "string") kept[name] = node[name];
  if ([usage?.completion_tokens, usage?.prompt_tokens].every(Number.isFinite)) kept.usage = usage;
  return kept;
}

/** The branch that is shown, as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  const system = (conversation.settings.system ?? "").trim();
  if (system) parts.push("## System", system);
  for (const node of path(conversation)) {
    parts.push(`## ${NAMES[node.role]}${node.role === "assistant" && node.model ? ` (${node.model})` : ""}`);
    for (const file of node.files ?? []) parts.push(`File ${file.name}:`, fence(file.text));
    if (node.reasoning) parts.push(node.reasoning.replace(/^/gm, "> "));
    if (node.text) parts.push(node.text);
    for (const call of node.calls ?? []) parts.push(`Tool call ${call.name}:`, fence(call.arguments));
    for (const result of node.results ?? []) parts.push(fence(result.text));
  }
  return `${parts.join("\n\n")}\n`;
}

/** A name for a file, of letters that every system takes. */
export function fileName(title, ending) {
  const words = title
    .normalize("NFKD")
    .replace(/[^\w -]+/g, "")
    .trim()
    .replace(/\s+/g, "-")
    .slice(0, 60);
  return `${words || "conversation"}.${ending}`;
}
