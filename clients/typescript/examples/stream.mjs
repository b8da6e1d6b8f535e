// A stream that survives its connection and its gateway.
// RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.
import { Client } from "ryzanstein-client";

const urls = (process.env.RYZANSTEIN_URL ?? "http://127.0.0.1:8000").split(",");
const client = new Client(urls, { apiKey: process.env.RYZANSTEIN_API_KEY ?? "none" });
const [model = ""] = await client.models();
const stream = client.streamChat({
  model,
  messages: [{ role: "user", content: "Tell me a story." }],
  max_tokens: 200,
});
for await (const piece of stream) process.stdout.write(piece.text);
console.log();
