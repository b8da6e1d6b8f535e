/** Batches: a file of requests in, files of answers out (docs/batch.md of the server). */

import { newKey } from "./keys.js";
import type { Ask } from "./reading.js";
import { Exchange, lines, sleep, type Transport } from "./transport.js";
import type { CallOptions, Json } from "./types.js";

const FILES = "/v1/files";
const BATCHES = "/v1/batches";
const OVER = new Set(["completed", "failed", "expired", "cancelled"]);

/** A batch as it was when it was asked for. */
export interface Batch {
  readonly id: string;
  readonly status: string;
  readonly over: boolean;
  readonly total: number;
  readonly completed: number;
  /** Lines that have an error for their answer. */
  readonly failed: number;
  /** What is wrong with the input file, a sentence each. */
  readonly errors: readonly string[];
  /** OpenAI's object. */
  readonly raw: Json;
}

export interface SubmitOptions extends CallOptions {
  /** `/v1/chat/completions`. */
  endpoint?: string | undefined;
  /** How long it may take: `24h`, `90m`, `7d`. */
  window?: string | undefined;
  metadata?: Record<string, string> | undefined;
}

export interface WatchOptions {
  /** Milliseconds between two looks. 1,000. */
  interval?: number | undefined;
  signal?: AbortSignal | undefined;
}

/** JSON lines, or the requests themselves. A `Blob` is never held as a whole: in Node `await fs.openAsBlob(path)`. */
export type BatchInput = string | Uint8Array | Blob | readonly object[];

/** Methods throw `ApiError` for what the server refuses, `LostConnection` when patience is at its end. */
export class Batches {
  readonly #transport: Transport;

  /** @internal */
  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Uploads requests and hands them in; returns before they have been checked. `idempotencyKey`: for a program that
   * may be killed and begin again: with the same key the same batch comes back, provided the input is the same. */
  async submit(input: BatchInput, options: SubmitOptions = {}): Promise<Batch> {
    const { signal, headers } = options;
    const key = options.idempotencyKey ?? newKey();
    const data = blobOf(input);
    const name = `client-${encodeURIComponent(key).replaceAll("%", "_")}.jsonl`;
    const keyed = options.idempotencyKey !== undefined;
    let file = keyed ? await this.#uploaded(name, data.size, signal) : null;
    if (file === null) {
      const made = await this.#upload(name, data, signal);
      file = keyed ? ((await this.#uploaded(name, data.size, signal)) ?? made) : made;
    }
    const body = JSON.stringify({
      input_file_id: file,
      endpoint: options.endpoint ?? "/v1/chat/completions",
      completion_window: options.window ?? "24h",
      ...(options.metadata ? { metadata: options.metadata } : {}),
    });
    const ask = { method: "POST", path: BATCHES, headers: { "idempotency-key": key, ...headers }, body };
    return batchFrom(await this.#transport.json(ask, signal));
  }

  async status(batch: string, signal?: AbortSignal): Promise<Batch> {
    return batchFrom(await this.#get(pathOf(batch), signal));
  }

  /** Begins no more of its lines; what is done is kept. */
  async cancel(batch: string, signal?: AbortSignal): Promise<Batch> {
    return batchFrom(await this.#transport.json({ method: "POST", path: `${pathOf(batch)}/cancel` }, signal));
  }

  /** The newest first. */
  async newest(limit = 20, signal?: AbortSignal): Promise<Batch[]> {
    const found = await this.#get(`${BATCHES}?limit=${limit}`, signal);
    return (found["data"] as Json[]).map(batchFrom);
  }

  /** The batch now and whenever it has changed; ends when it is over. */
  async *watch(batch: string, { interval = 1000, signal }: WatchOptions = {}): AsyncGenerator<Batch, void> {
    let last = "";
    for (;;) {
      const found = await this.status(batch, signal);
      const seen = JSON.stringify(found.raw);
      if (seen !== last) yield found;
      if (found.over) return;
      last = seen;
      await sleep(interval, signal);
    }
  }

  /** Returns when it is over. */
  async wait(batch: string, options: WatchOptions & { progress?: (batch: Batch) => void } = {}): Promise<Batch> {
    let last: Batch | null = null;
    for await (const found of this.watch(batch, options)) {
      last = found;
      options.progress?.(found);
    }
    return last ?? (await this.status(batch, options.signal));
  }

  /** Lines of the output file, or of the file of errors, each once: a download that is cut goes on where it was.
   * Nothing where the batch has no such file. */
  async *results(
    batch: Batch,
    which: "output" | "errors" = "output",
    signal?: AbortSignal,
  ): AsyncGenerator<Json, void> {
    const file = batch.raw[which === "output" ? "output_file_id" : "error_file_id"] as string | null | undefined;
    if (!file) return;
    const ask = { method: "GET", path: `${FILES}/${encodeURIComponent(file)}/content` };
    let taken = 0;
    for await (const line of this.#transport.flow((url) => this.#lines(url, ask, taken, signal), signal)) {
      taken += 1;
      yield JSON.parse(line) as Json;
    }
  }

  // --- HTTP -------------------------------------------------------------------------------------------------------

  async #get(path: string, signal: AbortSignal | undefined): Promise<Json> {
    return this.#transport.json({ method: "GET", path }, signal);
  }

  async #upload(name: string, data: Blob, signal: AbortSignal | undefined): Promise<string> {
    const form = new FormData();
    form.set("purpose", "batch");
    form.set("file", data, name);
    const ask = { method: "POST", path: FILES, body: form };
    const answer = await this.#transport.json(ask, signal, this.#transport.answerTimeout);
    return answer["id"] as string;
  }

  /** The id of the oldest file that a try has left: the same for every later try. Null where there is none. */
  async #uploaded(name: string, size: number, signal: AbortSignal | undefined): Promise<string | null> {
    for (let after = ""; ; ) {
      const page = await this.#get(`${FILES}?purpose=batch&order=asc&limit=1000${after}`, signal);
      const files = page["data"] as Json[];
      const found = files.find((file) => file["filename"] === name && file["bytes"] === size);
      if (found) return found["id"] as string;
      if (!page["has_more"] || files.length === 0) return null;
      after = `&after=${encodeURIComponent(files[files.length - 1]?.["id"] as string)}`;
    }
  }

  /** Whole lines behind the first `skipped` ones, on one connection. */
  async *#lines(url: string, ask: Ask, skipped: number, signal?: AbortSignal): AsyncGenerator<string, void> {
    const exchange = new Exchange(this.#transport.timeout, signal);
    try {
      let number = 0;
      for await (const line of lines(await this.#transport.open(url, ask, exchange), exchange)) {
        if (line && (number += 1) > skipped) yield line;
      }
    } finally {
      exchange.end();
    }
  }
}

function pathOf(batch: string): string {
  return `${BATCHES}/${encodeURIComponent(batch)}`;
}

function blobOf(input: BatchInput): Blob {
  if (input instanceof Blob) return input;
  if (typeof input === "string" || input instanceof Uint8Array) return new Blob([input as BlobPart]);
  return new Blob(input.map((line) => JSON.stringify(line) + "\n"));
}

function batchFrom(raw: Json): Batch {
  const counts = (raw["request_counts"] ?? {}) as Json;
  const wrong = (raw["errors"]?.data ?? []) as Json[];
  return {
    id: raw["id"],
    status: raw["status"],
    over: OVER.has(raw["status"] as string),
    total: counts["total"] ?? 0,
    completed: counts["completed"] ?? 0,
    failed: counts["failed"] ?? 0,
    errors: wrong.map((each) => (each["line"] ? `line ${each["line"]}: ${each["message"]}` : String(each["message"]))),
    raw,
  };
}
