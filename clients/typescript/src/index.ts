/** Streams that survive their connection, generations that others attach to, repeats that cost nothing, and batches.
 * For everything else use OpenAI's package. */

export { Batches, type Batch, type BatchInput, type SubmitOptions, type WatchOptions } from "./batches.js";
export { Client, Stream } from "./client.js";
export { ApiError, LostConnection } from "./errors.js";
export { textOf } from "./reading.js";
export type {
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
  RankedDocument,
  Ranking,
  RerankRequest,
  ResponseRequest,
  ScoreRequest,
  Scores,
  Status,
  StreamOptions,
} from "./types.js";
