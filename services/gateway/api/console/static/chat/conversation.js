// A conversation: a tree of messages, of which one path is shown. Pure: time and ids come in as arguments.
//
// A message that is edited, or an answer that is generated anew, is a sibling of the one before: nothing is lost.

export const LIMITS = {
  conversations: 1000, // that are kept
  nodes: 5000, // of one conversation
  text: 8 << 20, // characters of one conversation
  files: 10, // of one message
  file: 512 << 10, // characters of one file
  import: 64 << 20, // bytes of a file that is imported
  title: 120, // characters
};
const ROLES = ["user", "assistant", "tool"];

/** An empty one. `settings`: see settings.js. */
export function create(id, now, settings) {
  return { id, title: "", named: false, created: now, updated: now, leaf: null, settings: { ...settings }, nodes: {} };
}

/** Adds a message below `parent` (null: at the beginning), and shows it. Throws `RangeError` at the limits. */
export function add(conversation, parent, fields) {
  if (Object.keys(conversation.nodes).length >= LIMITS.nodes) {
    throw new RangeError(`A conversation has at most ${LIMITS.nodes} messages; begin a new one.`);
  }
  if (size(conversation) + lengthOf(fields) > LIMITS.text) {
    throw new RangeError(`A conversation has at most ${LIMITS.text >> 20} Mi characters; begin a new one.`);
  }
  const node = { parent, text: "", revision: 0, ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = Math.max(conversation.updated, node.at);
  if (!conversation.named && node.role === "user" && parent === null) conversation.title = titleOf(node);
  return node;
}

function titleOf(node) {
  const line = node.text.trim().split("\n", 1)[0] || node.files?.[0]?.name || "";
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

function lengthOf(node) {
  const files = (node.files ?? []).reduce((sum, file) => sum + file.text.length, 0);
  return (node.text?.length ?? 0) + (node.reasoning?.length ?? 0) + files;
}

/** Characters of all its messages. */
export function size(conversation) {
  return Object.values(conversation.nodes).reduce((sum, node) => sum + lengthOf(node), 0);
}

/** Nodes from the beginning to `leaf`. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  const seen = new Set();
  for (let at = leaf; at !== null && at !== undefined && !seen.has(at); at = conversation.nodes[at].parent) {
    if (!conversation.nodes[at]) break;
    seen.add(at);
    found.push(conversation.nodes[at]);
  }
  return found.reverse();
}

/** The versions of a message, itself among them, in the order in which they came. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes)
    .filter((other) => other.parent === node.parent)
    .sort((one, other) => one.at - other.at || (one.id < other.id ? -1 : 1));
}

/** Shows the branch through `node`, down to what came last in it. */
export function choose(conversation, node) {
  let at = node;
  for (;;) {
    const below = Object.values(conversation.nodes).filter((other) => other.parent === at.id);
    if (!below.length) break;
    at = below.reduce((one, other) => (other.at >= one.at ? other : one));
  }
  conversation.leaf = at.id;
}

/** What a user's message is to the model: its text, with its files before it. */
export function contentOf(node) {
  const files = (node.files ?? []).map((file) => `File ${file.name}:\n${fence(file.text)}`);
  return [...files, node.text].filter(Boolean).join("\n\n");
}

/** A code block around any text: its fence is longer than any in it. */
export function fence(text) {
  const longest = (text.match(/`{3,}/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const mark = "`".repeat(longest + 1);
  return `${mark}\n${text}\n${mark}`;
}

/** Messages as the API takes them, down to `leaf`. */
export function messages(conversation, leaf = conversation.leaf) {
  const system = (conversation.settings.system ?? "").trim();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const node of path(conversation, leaf)) {
    if (node.role === "user") found.push({ role: "user", content: contentOf(node) });
    else if (node.role === "tool") {
      for (const result of node.results) found.push({ role: "tool", tool_call_id: result.id, content: result.text });
    } else if (node.text || node.calls?.length) found.push(answered(node));
  }
  return found;
}

function answered(node) {
  const message = { role: "assistant", content: node.text };
  if (node.calls?.length) {
    message.tool_calls = node.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

/** Two states of one conversation, as two tabs may have them: all messages, each in its newer state. */
export function merge(stored, mine) {
  const newer = mine.updated >= stored.updated ? mine : stored;
  const nodes = { ...stored.nodes };
  for (const [id, node] of Object.entries(mine.nodes)) {
    if (!nodes[id] || node.revision >= nodes[id].revision) nodes[id] = node;
  }
  return { ...newer, leaf: mine.leaf, nodes };
}

/** Whether `mine` has anything that `stored`, a state of the same conversation, has not. */
export function isNews(stored, mine) {
  const unseen = ({ id, revision }) => !stored.nodes[id] || revision > stored.nodes[id].revision;
  return mine.updated > stored.updated || Object.values(mine.nodes).some(unseen);
}

/** Whether all words of `query` stand in its title or its messages. */
export function matches(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.text)];
  const all = texts.join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

/** What the list shows of one. */
export const headOf = ({ id, title, updated }) => ({ id, title, updated });

/** What is wrong with a conversation from a file, in words; empty: nothing. */
export function problem(conversation) {
  const { id, title, nodes, leaf, created, updated } = conversation ?? {};
  if (typeof id !== "string" || !/^[\w-]{1,64}$/.test(id)) return "a conversation has no id";
  if (typeof title !== "string" || title.length > LIMITS.title) return "a title is missing or too long";
  if (![created, updated].every(Number.isFinite)) return "its times are missing";
  if (typeof nodes !== "object" || nodes === null || Array.isArray(nodes)) return "its messages are missing";
  if (typeof conversation.settings !== "object" || conversation.settings === null) return "its settings are missing";
  if (Object.keys(nodes).length > LIMITS.nodes) return `it has more than ${LIMITS.nodes} messages`;
  for (const [key, node] of Object.entries(nodes)) {
    const wrong = nodeProblem(key, node, nodes);
    if (wrong) return `message ${key.slice(0, 40)}: ${wrong}`;
  }
  if (leaf !== null && !nodes[leaf]) return "the message that is shown is missing";
  if (Object.values(nodes).some((node) => path(conversation, node.id)[0]?.parent !== null)) {
    return "its messages form a circle";
  }
  return size(conversation) > LIMITS.text ? "it is too long" : "";
}

function nodeProblem(key, node, nodes) {
  if (!/^[a-zA-Z\d-]\w{0,63}$/.test(key) || typeof node !== "object" || node?.id !== key) return "its id is not its key, or none";
  if (!ROLES.includes(node.role)) return "its role is none of user, assistant and tool";
  if (typeof node.text !== "string" || !Number.isFinite(node.at)) return "its text or its time is missing";
  if (node.parent !== null && !Object.hasOwn(nodes, node.parent)) return "the message before it is missing";
  if (node.reasoning !== undefined && typeof node.reasoning !== "string") return "its reasoning is not text";
  if (!(node.files ?? []).every((file) => strings(file, "name", "text"))) return "a file has no name or no text";
  if (!(node.calls ?? []).every((call) => strings(call, "id", "name", "arguments"))) return "a tool call is not whole";
  if (node.role === "tool" && !Array.isArray(node.results)) return "its results are missing";
  return (node.results ?? []).every((one) => strings(one, "id", "text")) ? "" : "a result is not whole";
}

const strings = (value, ...names) => names.every((name) => typeof value?.[name] === "string");
