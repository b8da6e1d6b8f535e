// The `ollama` npm package against a server: URL and model are the arguments. Prints what it has seen as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [host, model, modules] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(`${modules}/`)).resolve("ollama");
const { Ollama } = createRequire(import.meta.url)(entry);
const client = new Ollama({ host });
const messages = [{ role: "user", content: "Hi" }];
const options = { num_predict: 8, seed: 7 };
const seen = {};

const whole = await client.chat({ model, messages, options });
seen.whole = [whole.message.content, whole.done_reason, whole.eval_count];

let text = "";
let reason = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content;
  reason = part.done_reason ?? reason;
}
seen.streamed = [text, reason];

const completion = await client.generate({ model, prompt: "Hi", raw: true, options });
seen.completion = completion.response.length;

const format = { type: "object", properties: { age: { type: "integer" } }, required: ["age"] };
const formatted = await client.chat({ model, messages, format, options: { seed: 7, num_predict: 64 } });
seen.formatted = JSON.parse(formatted.message.content);

const vectors = await client.embed({ model, input: ["Hi", "there"] });
seen.embeddings = vectors.embeddings.map((vector) => vector.length);
seen.models = (await client.list()).models.map((item) => item.name);
seen.loaded = (await client.ps()).models.map((item) => item.name);
seen.capabilities = (await client.show({ model })).capabilities;

try {
  await client.chat({ model: "nobody", messages });
} catch (error) {
  seen.refused = [error.status_code, error.error];
}
console.log(JSON.stringify(seen));
