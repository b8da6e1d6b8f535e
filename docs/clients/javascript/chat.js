// A chat, streamed, with OpenAI's package: npm install
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: (process.env.RYZANSTEIN_URL ?? "http://127.0.0.1:8000") + "/v1",
  apiKey: process.env.RYZANSTEIN_API_KEY ?? "none",
});
const model = (await client.models.list()).data[0].id;
const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "Tell me a story." }],
  max_tokens: 200,
  stream: true,
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
}
console.log();
