// The `@anthropic-ai/sdk` npm package against a server: URL and model are the arguments. Prints what it has seen as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, modules] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(`${modules}/`)).resolve("@anthropic-ai/sdk");
const { default: Anthropic, BadRequestError } = createRequire(import.meta.url)(entry);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const asked = { model, messages, max_tokens: 8 };
const seen = {};

const whole = await client.messages.create(asked);
seen.whole = [whole.content[0].type, whole.content[0].text.length, whole.stop_reason, whole.usage.output_tokens];

const kinds = new Set();
const stream = client.messages.stream(asked);
for await (const event of stream) {
  kinds.add(event.type);
}
const final = await stream.finalMessage();
seen.streamed = [final.content[0].text.length, final.stop_reason, final.usage.output_tokens, [...kinds].sort()];

const input_schema = { type: "object", properties: { city: { type: "string", enum: ["Rome"] } }, required: ["city"] };
const tools = [{ name: "weather", input_schema }];
const calling = { ...asked, max_tokens: 400, tools, tool_choice: { type: "tool", name: "weather" } };
const called = await client.messages.stream(calling).finalMessage();
const call = called.content[0];
seen.called = [called.stop_reason, call.type, call.name, call.input];
const result = { type: "tool_result", tool_use_id: call.id, content: "22 degrees" };
const turns = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
seen.answered = (await client.messages.create({ ...asked, messages: turns, tools })).type;

seen.counted = (await client.messages.countTokens({ model, messages })).input_tokens;
seen.models = (await client.models.list()).data.map((item) => item.id);

const requests = ["a", "b"].map((custom_id) => ({ custom_id, params: asked }));
let batch = await client.messages.batches.create({ requests });
while (batch.processing_status !== "ended") {
  await new Promise((done) => setTimeout(done, 100));
  batch = await client.messages.batches.retrieve(batch.id);
}
seen.batch = [batch.request_counts.succeeded];
for await (const item of await client.messages.batches.results(batch.id)) {
  seen.batch.push(`${item.custom_id} ${item.result.type}`);
}
seen.batch.sort();
seen.deleted = (await client.messages.batches.delete(batch.id)).type;

try {
  await client.messages.create({ ...asked, n: 2 });
} catch (error) {
  seen.refused = [error instanceof BadRequestError, error.error.error.type, Boolean(error.requestID)];
}
console.log(JSON.stringify(seen));
