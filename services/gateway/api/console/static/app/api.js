// Asking the gateway: its answers, its refusals in its own words, and its streams of events.
// Addresses are relative to the page, so that the console works below any base path.

import { EventParser } from "./stream.js";

export const access = { key: "" }; // the API key, sent with everything that is asked

/** What the gateway has refused. `status` is 0 where the refusal came within a stream. */
export class Refusal extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function refusalOf(answer) {
  let words = `The gateway answered with status ${answer.status}.`;
  let code = "";
  try {
    const { error } = await answer.json();
    words = error.message ?? words;
    code = error.code ?? "";
  } catch {
    // not in our shape: a proxy's page, perhaps
  }
  if (answer.status === 401) words += " Enter an API key under Keys.";
  return new Refusal(answer.status, words, code);
}

/** The response. Throws `Refusal`, and `TypeError` where nobody answers. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (access.key) headers.authorization = `Bearer ${access.key}`;
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (!answer.ok) throw await refusalOf(answer);
  return answer;
}

/** The JSON of an answer. */
export async function read(path) {
  return (await call(path)).json();
}

/** Sends JSON with `method`; the response. */
export function send(path, method, body, options = {}) {
  if (body === undefined) return call(path, { ...options, method });
  const headers = { "content-type": "application/json", ...options.headers };
  return call(path, { ...options, method, headers, body: JSON.stringify(body) });
}

/** Server-sent events of a response; an event that is cut off does not count. */
export async function* events(answer) {
  const parser = new EventParser();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

/** An error in words for people. */
export function told(error) {
  if (error instanceof Refusal) return error.message;
  if (error instanceof TypeError) return "The gateway does not answer; it may be starting, or the network is gone.";
  return error.message;
}

export const pause = (milliseconds) => new Promise((resume) => setTimeout(resume, milliseconds));

/** 32 hexadecimal digits; crypto.randomUUID is for secure contexts alone. */
export function random() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
