// The official npm client's tool runner, at a task with a tool: URL, model and the directory of its modules are the
// arguments. Prints what it has seen as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, modules] = process.argv.slice(2);
const from = createRequire(pathToFileURL(`${modules}/x.js`));
const Anthropic = from("@anthropic-ai/sdk").default;
const { betaTool } = from("@anthropic-ai/sdk/helpers/beta/json-schema");

const asked = [];
const weather = betaTool({
  name: "weather",
  description: "The weather in a city now.",
  inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  run: ({ city }) => {
    asked.push(city);
    return `${city}: 17 degrees`;
  },
});
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const runner = client.beta.messages.toolRunner({
  model,
  max_tokens: 512,
  tools: [weather],
  messages: [{ role: "user", content: "What is the weather in Rome?" }],
});
const answers = [];
let said = "";
for await (const message of runner) {
  answers.push(message.content.map((block) => block.type));
  said = message.content[0].text ?? "";
}
console.log(JSON.stringify({ asked, answers, said }));
