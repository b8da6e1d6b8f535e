/** Idempotency keys. */

/** 128 bits that nobody else has. They need not be secret: where a runtime shows no `crypto` (Node 18 without flags),
 * `Math.random` will do. `crypto.randomUUID` is not used: browsers have it on secure origins alone. */
export function newKey(): string {
  const bytes = new Uint8Array(16);
  if (globalThis.crypto) globalThis.crypto.getRandomValues(bytes);
  else bytes.forEach((_, index) => (bytes[index] = Math.floor(Math.random() * 256)));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
