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

/** `body`: text of the answer. */
function refusalOf(status, body) {
  let words = `The gateway answered with status ${status}.`;
  let code = "";
  try {
    const { error } = JSON.parse(body);
    words = error.message ?? words;
    code = error.code ?? "";
  } catch {
    // not in our shape: a proxy's page, perhaps
  }
  if (status === 401) words += " Enter an API key under Keys.";
  return new Refusal(status, words, code);
}

function authorized(headers) {
  return access.key ? { ...headers, authorization: `Bearer ${access.key}` } : { ...headers };
}

/** The response. Throws `Refusal`, and `TypeError` where nobody answers. */
export async function call(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", ...options, headers: authorized(options.headers) });
  if (!answer.ok) throw refusalOf(answer.status, await answer.text());
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

/** Sends a file with its purpose; the file object. `onSent(bytes)`: how much of the body is on its way, which `fetch`
 * does not tell. Throws as `call`, and `DOMException` (AbortError) where `signal` ends it. */
export function upload(file, purpose, onSent, signal) {
  const form = new FormData();
  form.append("purpose", purpose); // before the file: a wrong one is refused at once
  form.append("file", file);
  const request = new XMLHttpRequest();
  request.open("POST", "v1/files");
  for (const [name, value] of Object.entries(authorized())) request.setRequestHeader(name, value);
  return new Promise((resolve, reject) => {
    const ended = () => {
      try {
        if (request.status !== 200) throw refusalOf(request.status, request.responseText);
        resolve(JSON.parse(request.responseText));
      } catch (error) {
        reject(error);
      }
    };
    request.upload.addEventListener("progress", (event) => onSent(event.loaded));
    request.addEventListener("load", ended);
    request.addEventListener("error", () => reject(new TypeError("network"))); // as fetch says it
    request.addEventListener("abort", () => reject(signal.reason));
    signal.addEventListener("abort", () => request.abort());
    request.send(form);
  });
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
