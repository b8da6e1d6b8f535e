// A batch: a file of JSON lines in, results out. node batch.mjs input.jsonl
// With the same RYZANSTEIN_KEY a program that was killed and begins again gets the same batch.
import { openAsBlob } from "node:fs";
import { Client } from "ryzanstein-client";

const url = process.env.RYZANSTEIN_URL ?? "http://127.0.0.1:8000";
const { batches } = new Client(url.split(","), { apiKey: process.env.RYZANSTEIN_API_KEY ?? "none" });
const input = await openAsBlob(process.argv[2] ?? "input.jsonl"); // Node 20
const { id } = await batches.submit(input, { window: "12h", idempotencyKey: process.env.RYZANSTEIN_KEY });
const batch = await batches.wait(id, {
  interval: 200,
  progress: ({ status, completed, failed, total }) => console.error(status, completed + failed, "of", total),
});
for (const error of batch.errors) console.error(error);
for await (const line of batches.results(batch)) console.log(JSON.stringify(line));
for await (const line of batches.results(batch, "errors")) console.error(JSON.stringify(line));
