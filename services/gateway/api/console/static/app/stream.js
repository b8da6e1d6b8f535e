// Events of a stream, and what each of them adds to an answer. Pure: no network, no page, no clock.

/** Server-sent events out of text that comes in any pieces (https://html.spec.whatwg.org/#parsing-an-event-stream). */
export class EventParser {
  #rest = "";

  /** The events that are whole now: {data, id, type}. `id` is null where the event has none. */
  push(text) {
    const parts = (this.#rest + text).split(/\r\n\r\n|\n\n|\r\r(?!\n)/);
    this.#rest = parts.pop();
    return parts.map(eventOf).filter((event) => event.data !== "");
  }
}

function eventOf(part) {
  const event = { data: "", id: null, type: "message" };
  const data = [];
  for (const line of part.split(/\r\n|\n|\r/)) {
    const colon = line.indexOf(":");
    if (colon === 0) continue; // a comment
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name === "id") event.id = value;
    else if (name === "event") event.type = value;
  }
  event.data = data.join("\n");
  return event;
}

/** Adds an event of a chat completion to an assistant's `node`; true at the end of the stream.
 *
 * `now`: milliseconds. Throws `StreamError` where the gateway tells of an error. `node.pending.last` is the id up to
 * which the text is complete, so text and id have to be kept together. */
export function take(node, event, now) {
  if (event.data === "[DONE]") return true;
  const chunk = JSON.parse(event.data);
  if (chunk.error) throw new StreamError(chunk.error.message, chunk.error.code ?? "");
  const { pending } = node;
  pending.id = chunk.id ?? pending.id;
  pending.last = event.id ?? pending.last;
  delete pending.body; // the generation is known by its id now
  if (chunk.model) node.model = chunk.model;
  if (chunk.usage) node.usage = chunk.usage;
  pending.progress = chunk.prompt_progress ?? null; // until the first chunk that is none
  for (const choice of chunk.choices ?? []) addChoice(node, choice, now);
  return false;
}

export class StreamError extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

function addChoice(node, choice, now) {
  const delta = choice.delta ?? {};
  if (delta.content || delta.reasoning_content || delta.tool_calls) node.pending.first ??= now;
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  if (delta.content) node.text += delta.content;
  for (const piece of delta.tool_calls ?? []) addCall(node, piece);
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

function addCall(node, piece) {
  node.calls ??= [];
  const call = (node.calls[piece.index] ??= { id: "", name: "", arguments: "" });
  if (piece.id) call.id = piece.id;
  if (piece.function?.name) call.name += piece.function.name;
  if (piece.function?.arguments) call.arguments += piece.function.arguments;
}

/** Seconds to the first token and tokens per second behind it; null for what nobody could measure, as where the page
 * was away meanwhile. `now`: milliseconds. */
export function pace(node, now) {
  const { began, first, away } = node.pending;
  const tokens = (node.usage?.completion_tokens ?? 0) - 1;
  const seconds = first ? (now - first) / 1000 : 0;
  return {
    first: first && !away ? (first - began) / 1000 : null,
    rate: !away && seconds > 0 && tokens > 0 ? tokens / seconds : null,
    total: (now - began) / 1000,
  };
}

/** Whether a stream that broke with `status` (0: no answer at all) may be asked for again. `known`: the gateway has, or
 * may have, taken the request before. */
export function passing(status, known) {
  return status === 0 || (known && [429, 502, 503, 504].includes(status)) || status === 502;
}

/** Milliseconds before the next try. */
export const backoff = (lost) => Math.min(3000, 100 * 2 ** lost);
