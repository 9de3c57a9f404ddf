// Clients in JavaScript against a server: node clients.mjs http://127.0.0.1:8000/v1
import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const baseURL = process.argv[2];
const model = "SmolLM2-135M-Instruct";
const messages = [{ role: "user", content: "Who wrote Pride and Prejudice?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "The weather of a city.", parameters } }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const compatible = createOpenAICompatible({ name: "cocoa", baseURL, includeUsage: true })(model);

const checks = {
  async "openai: a whole answer has its risk"() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
    const [choice] = answer.choices;
    assert.ok(choice.message.content.length > 0);
    assert.ok(choice.message.cocoa_risk.max_risk >= 0);
    assert.deepEqual(choice.logprobs.cocoa_risk, choice.message.cocoa_risk);
  },

  async "openai: a stream has spans, then the report"() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true });
    let [text, spans, report] = ["", [], null];
    for await (const chunk of stream) {
      const delta = chunk.choices[0].delta;
      text += delta.content ?? "";
      spans.push(...(delta.cocoa_spans ?? []));
      report = delta.cocoa_risk ?? report;
    }
    assert.equal(spans.map((span) => span.text).join(""), text);
    assert.equal(report.spans.length, spans.length);
  },

  async "openai: the stream helper joins the answer and its report"() {
    const runner = client.chat.completions.stream({ model, messages, max_tokens: 8 });
    const message = (await runner.finalChatCompletion()).choices[0].message;
    assert.ok(message.content.length > 0);
    assert.ok(message.cocoa_risk.spans.length > 0);
  },

  async "openai: a streamed call of a tool"() {
    const runner = client.chat.completions.stream({
      model, messages: weather, tools, tool_choice: "required", max_tokens: 48,
    });
    const choice = (await runner.finalChatCompletion()).choices[0];
    assert.equal(choice.finish_reason, "tool_calls");
    const [call] = choice.message.tool_calls;
    assert.deepEqual([call.type, call.function.name], ["function", "weather"]);
    assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
  },

  async "openai: a streamed completion"() {
    const stream = await client.completions.create({ model, prompt: "Once upon", max_tokens: 8, stream: true });
    let [text, spans] = ["", []];
    for await (const chunk of stream) {
      text += chunk.choices[0].text;
      spans.push(...(chunk.choices[0].cocoa_spans ?? []));
    }
    assert.equal(spans.map((span) => span.text).join(""), text);
  },

  async "openai: an error has its parameter"() {
    await assert.rejects(
      client.chat.completions.create({ model, messages, frequency_penalty: 1 }),
      (error) => error.status === 400 && error.param === "frequency_penalty",
    );
  },

  async "ai: streamText"() {
    const { fullStream, text, usage } = streamText({ model: compatible, messages, maxOutputTokens: 8, maxRetries: 0 });
    for await (const part of fullStream) assert.notEqual(part.type, "error", String(part.error));
    assert.ok((await text).length > 0);
    assert.ok((await usage).outputTokens > 0);
  },

  async "ai: streamText calls a tool"() {
    const asked = [];
    const result = streamText({
      model: compatible, messages: weather, maxOutputTokens: 48, maxRetries: 0, toolChoice: "required",
      tools: { weather: tool({ description: "The weather.", inputSchema: jsonSchema(parameters),
        execute: async ({ city }) => { asked.push(city); return "sunny"; } }) },
    });
    const kinds = [];
    for await (const part of result.fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      kinds.push(part.type);
    }
    assert.ok(kinds.includes("tool-call") && kinds.includes("tool-result"), kinds.join());
    assert.equal(asked.length, 1);
    assert.equal(await result.finishReason, "tool-calls");
  },

  async "ai: generateText calls a tool"() {
    const { toolCalls } = await generateText({
      model: compatible, messages: weather, maxOutputTokens: 48, maxRetries: 0, toolChoice: "required",
      tools: { weather: tool({ description: "The weather.", inputSchema: jsonSchema(parameters) }) },
    });
    assert.equal(toolCalls[0].toolName, "weather");
  },

  async "ai: generateObject"() {
    const structured = createOpenAICompatible({ name: "cocoa", baseURL, supportsStructuredOutputs: true })(model);
    const { object } = await generateObject({
      model: structured, messages: weather, maxOutputTokens: 32, maxRetries: 0, schema: jsonSchema(parameters),
    });
    assert.ok(["Paris", "Rome"].includes(object.city));
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok      ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}\n${error.stack ?? error}`);
  }
}
console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
