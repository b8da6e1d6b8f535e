// The `openai` npm package against a server: URL and model are the arguments. Prints what it has seen as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, modules] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(`${modules}/`)).resolve("openai");
const { default: OpenAI, BadRequestError } = createRequire(import.meta.url)(entry);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const seen = {};

const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 7 });
seen.whole = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens];

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 8, seed: 7, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
seen.streamed = [text, usage.completion_tokens];

const completion = await client.completions.create({ model, prompt: "Hi", max_tokens: 4, echo: true, best_of: 3 });
seen.completion = completion.choices[0].text;

const vectors = await client.embeddings.create({ model, input: ["Hi", "there"] });
seen.embeddings = vectors.data.map((item) => item.embedding.length);
seen.models = (await client.models.list()).data.map((item) => item.id);

try {
  await client.completions.create({ model, prompt: "Hi", suffix: "end" });
} catch (error) {
  seen.refused = [error instanceof BadRequestError, error.code, error.param];
}
console.log(JSON.stringify(seen));
