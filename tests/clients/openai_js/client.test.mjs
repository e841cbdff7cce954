// The official client, of JavaScript. The texts are those of scripted.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const options = { apiKey: "none", maxRetries: 0 };
const client = new OpenAI({ baseURL: process.env.ENGINE_CORE_SCRIPTED, ...options });
const real = new OpenAI({ baseURL: process.env.ENGINE_CORE_SMOLLM2, ...options });
const ask = { role: "user", content: "What is it?" };
const first = "An engine runs models.";
const again = "It runs them fast.";
const parameters = { type: "object", properties: { city: { type: "string" } } };
const sky = z.object({ sky: z.enum(["clear", "grey"]), wet: z.boolean() });

test("several turns", async () => {
  const { choices } = await client.chat.completions.create({ model: "scripted", messages: [ask] });
  assert.equal(choices[0].message.content, first);
  const messages = [ask, choices[0].message, { role: "user", content: "And?" }];
  const second = await client.chat.completions.create({ model: "scripted", messages });
  assert.equal(second.choices[0].message.content, again);
});

test("a stream, piece by piece and put together", async () => {
  const body = { model: "scripted", messages: [ask], stream: true };
  const chunks = await client.chat.completions.create({
    ...body,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of chunks) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, first);
  assert.equal(usage.completion_tokens, 8);
  const message = await client.chat.completions.stream(body).finalMessage();
  assert.equal(message.content, first);
  const messages = [ask, message, { role: "user", content: "And?" }];
  const second = await client.chat.completions.create({ model: "scripted", messages });
  assert.equal(second.choices[0].message.content, again);
});

for (const stream of [false, true]) {
  test(`tools are run, ${stream ? "streamed" : "whole"}`, async () => {
    const asked = [];
    const run = ({ city }) => {
      asked.push(city);
      return "sunny";
    };
    const tool = { name: "get_weather", parse: JSON.parse, function: run, parameters };
    const runner = client.chat.completions.runTools({
      model: "scripted",
      messages: [ask],
      tools: [{ type: "function", function: { description: "The weather.", ...tool } }],
      stream,
    });
    assert.equal(await runner.finalContent(), "Rome is sunny.");
    assert.deepEqual(asked, ["Rome"]);
  });
}

test("structured output", async () => {
  const body = { model: "smollm2", messages: [ask], response_format: zodResponseFormat(sky, "sky") };
  const answer = await real.chat.completions.parse(body);
  sky.parse(answer.choices[0].message.parsed);
  const streamed = await real.chat.completions.stream(body).finalChatCompletion();
  sky.parse(streamed.choices[0].message.parsed);
});

test("models and completions", async () => {
  const names = [];
  for await (const model of real.models.list()) names.push(model.id);
  assert.deepEqual(names, ["smollm2"]);
  const body = { model: "smollm2", prompt: "The capital of France is", temperature: 0 };
  assert.match((await real.completions.create(body)).choices[0].text, /Paris/);
});

test("errors", async () => {
  const other = client.chat.completions.create({ model: "other", messages: [ask] });
  await assert.rejects(other, (error) => {
    assert(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    return error.message.includes("the model 'other' is not served here");
  });
  const long = { role: "user", content: " fast.".repeat(1024) };
  for (const stream of [false, true]) {
    const body = { model: "scripted", messages: [long], stream };
    await assert.rejects(client.chat.completions.create(body), (error) => {
      assert(error instanceof OpenAI.BadRequestError);
      assert.equal(error.code, "context_length_exceeded");
      return error.message.includes("the prompt is too long: it has 1026 tokens");
    });
  }
});
