/** The client of one server with any number of gateways. */

import { Batches } from "./batches.js";
import { ApiError, LostConnection } from "./errors.js";
import { newKey } from "./keys.js";
import { Reading, pathOf, stateFrom, type Ask } from "./reading.js";
import { Exchange, Transport, events } from "./transport.js";
import type {
  CallOptions,
  ChatRequest,
  ClientOptions,
  CompletionRequest,
  Cursor,
  EmbeddingRequest,
  GenerationState,
  Json,
  Piece,
  PrefillOptions,
  Prefilled,
  Ranking,
  RerankRequest,
  ResponseRequest,
  ScoreRequest,
  Scores,
  StreamOptions,
} from "./types.js";

const CHAT = "/v1/chat/completions";
const COMPLETIONS = "/v1/completions";
const RESPONSES = "/v1/responses";
const EMBEDDINGS = "/v1/embeddings";
const RERANK = "/v1/rerank";
const SCORE = "/v1/score";

/** Pieces of one generation, whatever connections and gateways are lost on the way. Iterate once; `break` and `close`
 * leave early: the generation ends some seconds later, unless somebody reads it, or it was asked to go on.
 *
 * Iterating throws `ApiError` for what the server refuses, `LostConnection` when patience is at its end, and the
 * signal's reason when it is aborted. */
export class Stream implements AsyncIterable<Piece> {
  readonly #reading: Reading;
  readonly #closing = new AbortController();
  readonly #pieces: AsyncGenerator<Piece, void>;
  #closed = false;

  /** @internal */
  constructor(
    reading: Reading,
    signal: AbortSignal | undefined,
    open: (until: AbortSignal) => AsyncGenerator<Piece, void>,
  ) {
    this.#reading = reading;
    this.#pieces = this.#read(signal, open);
  }

  /** Behind the last piece that was handed out; null before the first. */
  get cursor(): Cursor | null {
    return this.#reading.cursor;
  }

  /** What is left of the first choice's text, to its end. */
  async text(): Promise<string> {
    let text = "";
    for await (const piece of this) if (piece.choice === 0) text += piece.text;
    return text;
  }

  /** Closes the connection. Whoever iterates sees the end of the stream. */
  async close(): Promise<void> {
    this.#closed = true;
    this.#closing.abort();
    await this.#pieces.return();
  }

  [Symbol.asyncIterator](): AsyncIterator<Piece, void> {
    return this.#pieces;
  }

  async *#read(
    signal: AbortSignal | undefined,
    open: (until: AbortSignal) => AsyncGenerator<Piece, void>,
  ): AsyncGenerator<Piece, void> {
    const abort = (): void => this.#closing.abort(signal?.reason);
    if (signal?.aborted) abort();
    signal?.addEventListener("abort", abort);
    try {
      yield* open(this.#closing.signal);
    } catch (error) {
      if (!this.#closed) throw error;
    } finally {
      signal?.removeEventListener("abort", abort);
    }
  }
}

export class Client {
  /** Files of requests in, files of answers out. */
  readonly batches: Batches;
  readonly #transport: Transport;

  /** `urls`: a gateway, or several of which any will do. Throws a `TypeError` for what is no address. */
  constructor(urls: string | readonly string[], options: ClientOptions = {}) {
    this.#transport = new Transport(urls, options);
    this.batches = new Batches(this.#transport);
  }

  // --- streams ----------------------------------------------------------------------------------------------------

  /** A chat completion. Its fields are those of the endpoint. */
  streamChat<Body extends ChatRequest>(body: Body, options: StreamOptions = {}): Stream {
    return this.#begun(CHAT, body, options);
  }

  /** A completion of a prompt. */
  streamCompletion<Body extends CompletionRequest>(body: Body, options: StreamOptions = {}): Stream {
    return this.#begun(COMPLETIONS, body, options);
  }

  /** A response: each piece's `chunk` is one of OpenAI's events. */
  streamResponse<Body extends ResponseRequest>(body: Body, options: StreamOptions = {}): Stream {
    return this.#begun(RESPONSES, body, options);
  }

  /** Reads a generation from its beginning, or behind the position `after`; a cursor has its own. */
  attach(generation: string | Cursor, options: { after?: string; signal?: AbortSignal } = {}): Stream {
    const at = typeof generation === "string" ? { generation, position: "" } : generation;
    const cursor = { generation: at.generation, position: options.after ?? at.position };
    return this.#stream(new Reading({ cursor }), options.signal);
  }

  /** Begins a chat completion that goes on for `background` milliseconds (600,000) while nobody reads it. Returns at
   * its first token, with a cursor at its beginning. */
  async startChat<Body extends ChatRequest>(body: Body, options: StreamOptions = {}): Promise<Cursor> {
    const stream = this.streamChat(body, { ...options, background: options.background ?? 600_000 });
    for await (const _ of stream) break;
    if (stream.cursor === null) throw new ApiError("The stream ended without a chunk.");
    return { generation: stream.cursor.generation, position: "" };
  }

  // --- whole answers ----------------------------------------------------------------------------------------------

  /** A chat completion, whole. However often it is repeated on the way, it is generated once. */
  async chat<Body extends ChatRequest>(body: Body, options: CallOptions = {}): Promise<Json> {
    return this.#answer(CHAT, { ...body, stream: false }, options);
  }

  /** A completion of a prompt, whole. */
  async completion<Body extends CompletionRequest>(body: Body, options: CallOptions = {}): Promise<Json> {
    return this.#answer(COMPLETIONS, { ...body, stream: false }, options);
  }

  /** A response, whole. */
  async response<Body extends ResponseRequest>(body: Body, options: CallOptions = {}): Promise<Json> {
    return this.#answer(RESPONSES, { ...body, stream: false }, options);
  }

  async embeddings<Body extends EmbeddingRequest>(body: Body, options: CallOptions = {}): Promise<Json> {
    return this.#answer(EMBEDDINGS, body, options);
  }

  /** Documents by how well they answer a query. */
  async rerank<Body extends RerankRequest>(body: Body, options: CallOptions = {}): Promise<Ranking> {
    return (await this.#answer(RERANK, body, options)) as Ranking;
  }

  /** How well texts belong together, pair by pair. */
  async score<Body extends ScoreRequest>(body: Body, options: CallOptions = {}): Promise<Scores> {
    return (await this.#answer(SCORE, body, options)) as Scores;
  }

  /** Has a conversation so far computed before its next request, which names the session in `X-Session-ID`. */
  async prefill<Body extends ChatRequest>(session: string, body: Body, options: PrefillOptions = {}): Promise<Prefilled> {
    const path = `${prefillOf(session)}?wait=${(options.wait ?? 30_000) / 1000}`;
    const ask = { method: "POST", path, body: JSON.stringify(body) };
    const answer = await this.#transport.json(ask, options.signal, this.#transport.answerTimeout);
    return answer as unknown as Prefilled;
  }

  /** Ends what the session has under way at its gateway; false where there is nothing. */
  async cancelPrefill(session: string, signal?: AbortSignal): Promise<boolean> {
    const answer = await this.#transport.json({ method: "DELETE", path: prefillOf(session) }, signal);
    return Boolean(answer["cancelled"]);
  }

  /** Names of the models that are served. */
  async models(signal?: AbortSignal): Promise<string[]> {
    const answer = await this.#transport.json({ method: "GET", path: "/v1/models" }, signal);
    return (answer["data"] as Json[]).map((model) => model["id"] as string);
  }

  // --- generations ------------------------------------------------------------------------------------------------

  /** What has come of it so far. */
  async state(generation: string | Cursor, signal?: AbortSignal): Promise<GenerationState> {
    return stateFrom(await this.#transport.json({ method: "GET", path: pathOf(generation) }, signal));
  }

  /** Ends it for everybody; false when it had ended already. */
  async cancel(generation: string | Cursor, signal?: AbortSignal): Promise<boolean> {
    const answer = await this.#transport.json({ method: "DELETE", path: pathOf(generation) }, signal);
    return Boolean(answer["cancelled"]);
  }

  // --- shells of `Reading` and of retrying ------------------------------------------------------------------------

  async #answer(path: string, body: object, options: CallOptions): Promise<Json> {
    return this.#transport.json(begin(path, body, options), options.signal, this.#transport.answerTimeout);
  }

  #begun(path: string, body: object, options: StreamOptions): Stream {
    return this.#stream(new Reading({ begin: begin(path, { ...body, stream: true }, options) }), options.signal);
  }

  #stream(reading: Reading, signal: AbortSignal | undefined): Stream {
    return new Stream(reading, signal, (until) =>
      this.#transport.flow((url) => this.#connection(reading, url, until), until),
    );
  }

  /** One connection; ends with the stream, or throws. */
  async *#connection(reading: Reading, url: string, signal: AbortSignal): AsyncGenerator<Piece, void> {
    const exchange = new Exchange(this.#transport.timeout, signal);
    try {
      for await (const event of events(await this.#opened(reading, url, exchange), exchange)) {
        const piece = reading.take(event.data, event.id ?? "");
        if (piece !== null) yield piece;
        if (reading.done) return;
      }
    } finally {
      exchange.end();
    }
    throw new LostConnection("The stream ended in its middle.");
  }

  async #opened(reading: Reading, url: string, exchange: Exchange): Promise<Response> {
    try {
      return await this.#transport.open(url, reading.ask(), exchange);
    } catch (error) {
      throw error instanceof ApiError ? await this.#judged(error, reading, url) : error;
    }
  }

  /** A generation that has failed or was cancelled says so for ever: trying again would not end. */
  async #judged(error: ApiError, reading: Reading, url: string): Promise<ApiError> {
    if (!error.again || reading.cursor === null) return error;
    const state = await this.#transport.jsonAt(url, { method: "GET", path: pathOf(reading.cursor) });
    return ["failed", "cancelled"].includes(state["status"] as string) ? error.final() : error;
  }
}

/** A request that may be repeated: it always has a key. */
function prefillOf(session: string): string {
  return `/v1/sessions/${encodeURIComponent(session)}/prefill`;
}

function begin(path: string, body: object, options: StreamOptions): Ask {
  const headers: Record<string, string> = { "idempotency-key": options.idempotencyKey ?? newKey(), ...options.headers };
  if (options.background !== undefined) headers["x-ryzanstein-background"] = String(options.background / 1000);
  return { method: "POST", path, headers, body: JSON.stringify(body) };
}
