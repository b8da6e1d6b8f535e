/** The reading of one generation across any number of connections: what to ask next, what has come. No I/O.
 *
 *     POST path, Idempotency-Key ──▶ chunk: its id, event: its position
 *           │ lost before the first event                  │ lost
 *           └─▶ the same again: one generation             └─▶ GET /v1/generations/{id}/stream, Last-Event-ID
 */

import { ApiError, errorFrom } from "./errors.js";
import type { Cursor, GenerationState, Json, Piece } from "./types.js";

/** One HTTP request. */
export interface Ask {
  readonly method: string;
  readonly path: string;
  readonly headers?: Record<string, string> | undefined;
  /** JSON, or a form. */
  readonly body?: string | FormData | undefined;
}

const DONE = "[DONE]";
/** The last event of a response, and what its status is then. */
const ENDS: Record<string, string> = {
  "response.completed": "completed",
  "response.incomplete": "incomplete",
  "response.failed": "failed",
};

export class Reading {
  readonly #begin: Ask | null;
  #cursor: Cursor | null;
  #done = false;

  /** From a request, or from where somebody else stood. */
  constructor(from: { begin: Ask } | { cursor: Cursor }) {
    this.#begin = "begin" in from ? from.begin : null;
    this.#cursor = "cursor" in from ? from.cursor : null;
  }

  /** Behind the last event that was taken. */
  get cursor(): Cursor | null {
    return this.#cursor;
  }

  get done(): boolean {
    return this.#done;
  }

  /** The request that continues the stream behind what has been taken. */
  ask(): Ask {
    if (this.#cursor === null) return this.#begin as Ask;
    const { generation, position } = this.#cursor;
    const headers: Record<string, string> = position ? { "last-event-id": position } : {};
    return { method: "GET", path: `${pathOf(generation)}/stream`, headers };
  }

  /** One whole event; null: it has nothing for the caller. Throws `ApiError` for one that is an error. */
  take(data: string, id: string): Piece | null {
    if (data === "") return null;
    if (data === DONE) {
      this.#done = true;
      return null;
    }
    const chunk = parsed(data);
    if (chunk["error"] && !chunk["type"]) throw errorFrom(chunk["error"] as Json);
    return "type" in chunk ? this.#event(chunk, id) : this.#chunk(chunk, id);
  }

  #chunk(chunk: Json, id: string): Piece {
    this.#cursor = { generation: chunk["id"] as string, position: id };
    const choice = (chunk["choices"]?.[0] ?? {}) as Json; // one at most, as OpenAI has it
    const text = (choice["text"] || choice["delta"]?.content || "") as string;
    const finishReason = (choice["finish_reason"] ?? null) as string | null;
    return { text, position: id, choice: (choice["index"] ?? 0) as number, finishReason, chunk };
  }

  /** An event of a response. Its first one has the response's id. */
  #event(event: Json, id: string): Piece {
    const kind = event["type"] as string;
    if (kind === "error") throw errorFrom((event["error"] as Json | undefined) ?? event);
    const generation = (event["response"]?.id ?? this.#cursor?.generation) as string | undefined;
    if (generation === undefined) throw new ApiError("The stream of a response did not begin with its id.");
    this.#cursor = { generation, position: id };
    const finishReason = ENDS[kind] ?? null;
    if (finishReason !== null) this.#done = true;
    if (kind === "response.failed") throw errorFrom((event["response"]?.error ?? {}) as Json).final();
    const text = kind === "response.output_text.delta" ? (event["delta"] as string) : "";
    return { text, position: id, choice: 0, finishReason, chunk: event };
  }
}

/** The path of a generation, running or ended. */
export function pathOf(generation: string | Cursor): string {
  const name = typeof generation === "string" ? generation : generation.generation;
  return `/v1/generations/${encodeURIComponent(name)}`;
}

/** From what `GET /v1/generations/{id}` answers. */
export function stateFrom(answer: Json): GenerationState {
  const response = (answer["response"] ?? null) as Json | null;
  return {
    id: answer["id"],
    model: answer["model"],
    status: answer["status"],
    over: ["completed", "failed", "cancelled"].includes(answer["status"] as string),
    position: String(answer["position"] ?? ""),
    text: textOf(response ?? {}),
    response,
    error: (answer["error"] ?? null) as Json | null,
  };
}

/** The text of a chat completion, a completion or a response: of its first choice. */
export function textOf(answer: Json): string {
  const choice = answer["choices"]?.[0] as Json | undefined;
  if (choice) return (choice["message"]?.content || choice["text"] || "") as string;
  const items = (answer["output"] ?? []) as Json[];
  const parts = items.filter((item) => item["type"] === "message").flatMap((item) => item["content"] as Json[]);
  return parts.map((part) => (part["text"] ?? "") as string).join("");
}

function parsed(data: string): Json {
  try {
    return JSON.parse(data) as Json;
  } catch {
    throw new ApiError(`An event of the stream is not JSON: ${JSON.stringify(data.slice(0, 80))}.`);
  }
}
