/** What callers give and get. */

/** Where a reader stands in a generation. Whoever has it can go on, in any process; it is plain JSON. */
export interface Cursor {
  /** As the server names it: `chatcmpl-...`, `cmpl-...` or `resp_...`. */
  readonly generation: string;
  /** Id of the last event that is here; empty: nothing has been read, the stream comes from its beginning. */
  readonly position: string;
}

/** One event of a stream. */
export interface Piece {
  /** What it adds to the answer of its choice; empty where it says something else. */
  readonly text: string;
  /** Where a reader stands who has it: what `attach` takes as `after`. */
  readonly position: string;
  readonly choice: number;
  /** `stop`, `length`, `tool_calls`, ... on the last piece of a choice; of a response its final status. */
  readonly finishReason: string | null;
  /** OpenAI's chunk, or the event of a response: tool calls, log probabilities, usage. */
  readonly chunk: Json;
}

/** An object of the API: its fields are the endpoint's. */
export type Json = Record<string, any>;

export type Status = "queued" | "in_progress" | "completed" | "failed" | "cancelled";

/** What has come of a generation. */
export interface GenerationState {
  readonly id: string;
  readonly model: string;
  readonly status: Status;
  readonly over: boolean;
  /** `attach(id, { after: position })` goes on behind `response`. */
  readonly position: string;
  /** Of the first choice, as far as it has come. */
  readonly text: string;
  /** The endpoint's response, as far as it has come. */
  readonly response: Json | null;
  readonly error: Json | null;
}

export interface ChatRequest {
  model: string;
  messages: readonly object[];
}

export interface CompletionRequest {
  model: string;
  prompt: string | readonly number[];
}

export interface ResponseRequest {
  model: string;
  input: string | readonly object[];
}

export interface EmbeddingRequest {
  model: string;
  input: string | readonly string[] | readonly number[] | readonly (readonly number[])[];
}

/** The endpoint's other fields go with it: `max_tokens_per_doc`, `priority`, ... */
export interface RerankRequest {
  model: string;
  query: string;
  documents: readonly (string | { text: string })[];
  /** So many results, the best ones; left out: all. */
  top_n?: number;
  /** Whether results have the documents' texts; true where it is left out. */
  return_documents?: boolean;
}

export interface RankedDocument {
  /** Of the document in the request. */
  readonly index: number;
  readonly relevance_score: number;
  readonly document?: { readonly text: string };
}

/** Documents by how well they answer a query. */
export interface Ranking {
  readonly id: string;
  readonly model: string;
  /** The best first. */
  readonly results: readonly RankedDocument[];
  readonly usage: { readonly prompt_tokens: number; readonly total_tokens: number };
}

/** One with one, one with each of several, or several with as many. */
export interface ScoreRequest {
  model: string;
  queries: string | readonly string[];
  documents: string | readonly string[];
}

export interface Scores {
  readonly id: string;
  readonly model: string;
  /** Of each pair, in their order. */
  readonly data: readonly { readonly index: number; readonly score: number }[];
  readonly usage: { readonly prompt_tokens: number; readonly total_tokens: number };
}

/** How far a session's prompt is computed ahead of its next request. */
export interface Prefilled {
  /** Of the generation that computes it. */
  readonly id: string;
  readonly session: string;
  readonly model: string;
  /** `cancelled`: a longer conversation of the session has taken its place. */
  readonly status: "in_progress" | "completed" | "cancelled";
  readonly prompt_tokens: number;
  /** Of these, those that were there; null while it is not completed. */
  readonly cached_tokens: number | null;
  readonly computed_tokens: number | null;
}

export interface PrefillOptions {
  /** Milliseconds until it answers all the same, 0 to 60,000; 30,000. */
  wait?: number | undefined;
  signal?: AbortSignal | undefined;
}

export interface CallOptions {
  /** Yours, so that another process can repeat the request; else one is made up. 1 to 255 printable ASCII characters
   * without spaces. */
  idempotencyKey?: string | undefined;
  /** Ends the call, and closes its connection. */
  signal?: AbortSignal | undefined;
  /** More headers: `X-Session-ID`, `traceparent`, ... */
  headers?: Record<string, string> | undefined;
}

export interface StreamOptions extends CallOptions {
  /** Milliseconds for which it goes on with no reader; else the server's grace of 5 s. */
  background?: number | undefined;
}

export interface ClientOptions {
  apiKey?: string | undefined;
  /** Milliseconds of silence after which a stream's connection counts as lost, and the longest time for a short
   * answer (a state, a batch). 60,000. */
  timeout?: number | undefined;
  /** The longest time for a whole answer of a model. 600,000, as OpenAI's package has it. */
  answerTimeout?: number | undefined;
  /** Milliseconds since the first failure without anything new after which it gives up. 120,000. */
  patience?: number | undefined;
  /** Instead of the global one: with a proxy or certificates of your own, or for tests. */
  fetch?: typeof fetch | undefined;
}
