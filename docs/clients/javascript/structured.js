// An answer of a given form, with OpenAI's package: npm install
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: (process.env.RYZANSTEIN_URL ?? "http://127.0.0.1:8000") + "/v1",
  apiKey: process.env.RYZANSTEIN_API_KEY ?? "none",
});
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 150 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const answer = await client.chat.completions.create({
  model: (await client.models.list()).data[0].id,
  messages: [{ role: "user", content: "Anna is 31. Give me that as JSON." }],
  response_format: { type: "json_schema", json_schema: { name: "person", schema, strict: true } },
  max_tokens: 200,
});
const person = JSON.parse(answer.choices[0].message.content);
console.log(`${person.name} is ${person.age}.`);
