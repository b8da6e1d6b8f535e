/** When a request is tried again, and where. No I/O and no clock: times come in. All times are milliseconds. */

import { ApiError } from "./errors.js";

/** Before the first repeat; the later ones wait longer. */
const FIRST_WAIT = 50;
/** A generation that nobody reads is kept for 5 s, unless more was asked for: be back before. */
const LONGEST_WAIT = 1000;

/** How long failures in a row are borne. */
export class Patience {
  #since: number | null = null;
  #tries = 0;

  constructor(private readonly length: number) {}

  /** Something new has come. */
  renew(): void {
    this.#since = null;
    this.#tries = 0;
  }

  /** How long to wait after `error` at the time `now`; null: it has lasted too long. `chance` is between 0 and 1. */
  waitAfter(error: unknown, now: number, chance: number): number | null {
    this.#since ??= now;
    const asked = error instanceof ApiError ? error.retryAfter : null;
    const wait = asked ?? Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** Math.min(this.#tries, 10)) + FIRST_WAIT * chance;
    this.#tries += 1;
    return now + wait - this.#since > this.length ? null : wait;
  }
}

/** Addresses, and which is tried next. */
export class Gateways {
  readonly #urls: string[];
  #at = 0;

  /** Throws a `TypeError` for what is no address. */
  constructor(urls: string | readonly string[]) {
    const given = typeof urls === "string" ? [urls] : [...urls];
    this.#urls = given.map(withoutEnd);
    if (this.#urls.length === 0) throw new TypeError("Name at least one gateway, as http://HOST:8000.");
  }

  get current(): string {
    return this.#urls[this.#at] as string;
  }

  /** Goes on to the next one, if `url` is still the current one: others may have seen it first. */
  leave(url: string): void {
    if (url === this.current) this.#at = (this.#at + 1) % this.#urls.length;
  }
}

function withoutEnd(url: string): string {
  const found = url.trim().replace(/\/+$/, "").replace(/\/v1$/, "");
  if (!isAddress(found)) {
    throw new TypeError(`${JSON.stringify(url)} is no gateway: name it as http://HOST:8000.`);
  }
  return found;
}

function isAddress(url: string): boolean {
  try {
    return ["http:", "https:"].includes(new URL(url).protocol);
  } catch {
    return false;
  }
}
