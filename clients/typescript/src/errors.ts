/** What the server refuses, and what is worth trying again. */

import type { Json } from "./types.js";

/** A refusal for now: of a gateway that stops, a full queue, a broker that is away, a limit. */
const AGAIN_STATUS = new Set([429, 502, 503]);
/** Of an error in the middle of a stream: it is about this gateway, and another one goes on. */
const AGAIN_CODES = new Set(["unavailable", "broker_unavailable"]);

interface Told {
  status?: number;
  code?: string;
  type?: string;
  param?: string | null;
  retryAfter?: number | null;
  requestId?: string;
  again?: boolean;
}

/** An error in OpenAI's shape, or an answer that is none. */
export class ApiError extends Error {
  override readonly name = "ApiError";
  /** HTTP's; 0 for an error in the middle of a stream. */
  readonly status: number;
  readonly code: string;
  readonly type: string;
  readonly param: string | null;
  /** Milliseconds, where the server has said. */
  readonly retryAfter: number | null;
  readonly requestId: string;
  /** Whether the same request may succeed later, or elsewhere. */
  readonly again: boolean;

  constructor(message: string, told: Told = {}) {
    super(message);
    this.status = told.status ?? 0;
    this.code = told.code ?? "";
    this.type = told.type ?? "";
    this.param = told.param ?? null;
    this.retryAfter = told.retryAfter ?? null;
    this.requestId = told.requestId ?? "";
    this.again = told.again ?? false;
  }

  /** The same, of a generation that has failed or was cancelled: it says so for ever. */
  final(): ApiError {
    return new ApiError(this.message, { ...this, again: false });
  }
}

/** No gateway could be reached, or each was lost, for as long as the client's patience; `cause` has the last reason. */
export class LostConnection extends Error {
  override readonly name = "LostConnection";
}

/** From the object `error` of an answer, or of an event (which has no status). */
export function errorFrom(error: Json, status = 0, more: Told = {}): ApiError {
  const code = text(error["code"]);
  return new ApiError(text(error["message"]) || "The server gave no reason.", {
    ...more,
    status,
    code,
    type: text(error["type"]),
    param: typeof error["param"] === "string" ? error["param"] : null,
    again: status ? AGAIN_STATUS.has(status) : AGAIN_CODES.has(code),
  });
}

/** From an answer that is not a success; whatever a proxy on the way has made of it. */
export function refusal(status: number, headers: Headers, content: string): ApiError {
  const wait = headers.get("retry-after") ?? "";
  const more = {
    requestId: headers.get("x-request-id") ?? "",
    retryAfter: /^\d{1,9}$/.test(wait) ? Number(wait) * 1000 : null,
  };
  const error = errorIn(content);
  if (error) return errorFrom(error, status, more);
  const message = `The server answered ${status}, and not with an error of OpenAI's shape.`;
  return new ApiError(message, { ...more, status, again: AGAIN_STATUS.has(status) });
}

export function isWorthAnotherTry(error: unknown): boolean {
  return error instanceof LostConnection || (error instanceof ApiError && error.again);
}

function errorIn(content: string): Json | null {
  try {
    const found: unknown = JSON.parse(content);
    const error = (found as Json | null)?.["error"] as unknown;
    return typeof error === "object" ? (error as Json | null) : null;
  } catch {
    return null;
  }
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}
