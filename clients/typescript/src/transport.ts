/** HTTP by `fetch`: one try at one gateway, and the loop around it. */

import { createParser, type EventSourceMessage } from "eventsource-parser";

import { LostConnection, isWorthAnotherTry, refusal } from "./errors.js";
import type { Ask } from "./reading.js";
import { Gateways, Patience } from "./retries.js";
import type { ClientOptions, Json } from "./types.js";

/** Characters of one event. More is no answer of a model. */
const LONGEST_EVENT = 64 << 20;

export class Transport {
  readonly timeout: number;
  readonly answerTimeout: number;
  readonly #gateways: Gateways;
  readonly #headers: Record<string, string>;
  readonly #patience: number;
  readonly #fetch: typeof fetch;

  constructor(urls: string | readonly string[], options: ClientOptions) {
    this.#gateways = new Gateways(urls);
    this.#headers = options.apiKey ? { authorization: `Bearer ${options.apiKey}` } : {};
    this.timeout = options.timeout ?? 60_000;
    this.answerTimeout = options.answerTimeout ?? 600_000;
    this.#patience = options.patience ?? 120_000;
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
  }

  /** What connections bring one after the other: `connect` opens each behind what was handed out before, at one
   * gateway after the other, until one ends well, it is refused for good, or patience is at its end. */
  async *flow<T>(
    connect: (url: string) => AsyncGenerator<T, void>,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<T, void> {
    const patience = new Patience(this.#patience);
    for (;;) {
      signal?.throwIfAborted();
      const url = this.#gateways.current;
      try {
        for await (const item of connect(url)) {
          patience.renew();
          yield item;
        }
        return;
      } catch (error) {
        await this.#retreat(error, url, patience, signal);
      }
    }
  }

  /** A short answer in JSON, tried until it is there. */
  async json(ask: Ask, signal?: AbortSignal, timeout: number = this.timeout): Promise<Json> {
    const patience = new Patience(this.#patience);
    for (;;) {
      signal?.throwIfAborted();
      const url = this.#gateways.current;
      try {
        return await this.jsonAt(url, ask, signal, timeout);
      } catch (error) {
        await this.#retreat(error, url, patience, signal);
      }
    }
  }

  /** Leaves the gateway and waits; throws `error` where another try would not help. */
  async #retreat(error: unknown, url: string, patience: Patience, signal: AbortSignal | undefined): Promise<void> {
    if (!isWorthAnotherTry(error)) throw error;
    this.#gateways.leave(url);
    const wait = patience.waitAfter(error, Date.now(), Math.random());
    if (wait === null) throw error;
    await sleep(wait, signal);
  }

  /** One try at one gateway. */
  async jsonAt(url: string, ask: Ask, signal?: AbortSignal, timeout: number = this.timeout): Promise<Json> {
    const exchange = new Exchange(timeout, signal);
    try {
      const answer = await this.open(url, ask, exchange);
      const text = await exchange.watched(answer.text());
      try {
        return JSON.parse(text) as Json;
      } catch {
        throw new LostConnection(`${url} answered ${answer.status} without JSON.`);
      }
    } finally {
      exchange.end();
    }
  }

  /** The answer, when it is a success; throws `ApiError`, `LostConnection`, or a `TypeError` for what no header has. */
  async open(url: string, ask: Ask, exchange: Exchange): Promise<Response> {
    const json = typeof ask.body === "string" ? { "content-type": "application/json" } : {};
    const headers = new Headers({ ...json, ...this.#headers, ...ask.headers });
    const answer = await exchange.watched(
      this.#fetch(url + ask.path, {
        method: ask.method,
        headers,
        body: ask.body ?? null,
        signal: exchange.signal,
      }),
    );
    if (!answer.ok) {
      throw refusal(answer.status, answer.headers, await exchange.watched(answer.text()));
    }
    return answer;
  }
}

/** A connection's life: it ends when the caller's signal says so, and after `timeout` of silence. */
export class Exchange {
  readonly #controller = new AbortController();
  readonly #abort = (): void => this.#controller.abort(this.caller?.reason);

  constructor(
    private readonly timeout: number,
    private readonly caller?: AbortSignal,
  ) {
    caller?.throwIfAborted();
    caller?.addEventListener("abort", this.#abort);
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** What `step` brings, in time. Throws the caller's reason, or `LostConnection`. */
  async watched<T>(step: Promise<T>): Promise<T> {
    let silent: LostConnection | null = null;
    const timer = setTimeout(() => {
      silent = new LostConnection(`Nothing came for ${this.timeout} ms.`);
      this.#controller.abort(silent);
    }, this.timeout);
    try {
      return await step;
    } catch (error) {
      this.caller?.throwIfAborted();
      throw silent ?? new LostConnection(`The connection was lost: ${reasonOf(error)}.`, { cause: error });
    } finally {
      clearTimeout(timer);
    }
  }

  /** Closes the connection, wherever it stands. */
  end(): void {
    this.caller?.removeEventListener("abort", this.#abort);
    this.#controller.abort();
  }
}

/** Whole events of an answer: one counts when the blank line behind it is there. */
export async function* events(answer: Response, exchange: Exchange): AsyncGenerator<EventSourceMessage, void> {
  const found: EventSourceMessage[] = [];
  const parser = createParser({ onEvent: (event) => found.push(event), maxBufferSize: LONGEST_EVENT });
  for await (const text of texts(answer, exchange)) {
    parser.feed(text);
    yield* found.splice(0);
  }
}

/** Whole lines of an answer; what is behind the last newline too, at the end. */
export async function* lines(answer: Response, exchange: Exchange): AsyncGenerator<string, void> {
  let rest = "";
  for await (const text of texts(answer, exchange)) {
    const found = (rest + text).split("\n");
    rest = found.pop() as string;
    yield* found;
  }
  if (rest) yield rest;
}

async function* texts(answer: Response, exchange: Exchange): AsyncGenerator<string, void> {
  if (answer.body === null) return;
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const { done, value } = await exchange.watched(reader.read());
    if (done) return;
    yield decoder.decode(value, { stream: true });
  }
}

/** Ends early, with the signal's reason, when it is aborted. */
export async function sleep(milliseconds: number, signal?: AbortSignal): Promise<void> {
  signal?.throwIfAborted();
  await new Promise<void>((resolve) => {
    const wake = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", wake);
      resolve();
    };
    const timer = setTimeout(wake, milliseconds);
    signal?.addEventListener("abort", wake);
  });
  signal?.throwIfAborted();
}

/** Node hides the reason of a failed `fetch` in its cause. */
function reasonOf(error: unknown): string {
  const inner = error instanceof Error && error.cause instanceof Error ? error.cause : error;
  return inner instanceof Error ? inner.message || inner.name : String(inner);
}
