// OpenAI's own client for Node.js and Vercel's AI SDK, unchanged; prints what they got as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = process.env.BASE_URL;
const messages = [{ role: "user", content: "What is a mapping?" }];
const apiKey = process.env.API_KEY;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const provider = createOpenAICompatible({ name: "penstock", baseURL, apiKey });

async function openaiChat() {
  const fields = { model: "demo", messages, max_tokens: 12, seed: 5 };
  const whole = await client.chat.completions.create(fields);
  let text = "";
  for await (const event of await client.chat.completions.create({ ...fields, stream: true })) {
    text += event.choices[0]?.delta.content ?? "";
  }
  return { whole: whole.choices[0].message.content, streamed: text };
}

async function openaiResponses() {
  const fields = { model: "demo", input: "The list type", max_output_tokens: 12 };
  let done;
  for await (const event of await client.responses.create({ ...fields, stream: true })) {
    if (event.response) done = event.response;
  }
  const stored = await client.responses.retrieve(done.id);
  return { whole: stored.output_text, streamed: done.output[0].content[0].text };
}

async function aiSdk() {
  const fields = {
    model: provider("demo"), prompt: "What is a mapping?", maxOutputTokens: 12, temperature: 0,
  };
  const whole = await generateText(fields);
  let text = "";
  for await (const part of streamText(fields).textStream) text += part;
  return { whole: whole.text, streamed: text };
}

const tools = {
  weather: tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.enum(["Bonn", "Köln"]), days: z.number().int().min(1).max(9) }),
    execute: async ({ city, days }) => `${days} days of rain in ${city}`,
  }),
};

// Two rounds: the call, and what the model says when it has the result.
async function aiSdkTools() {
  const fields = {
    model: provider("caller"), prompt: "What is the weather in Köln?", tools, temperature: 0,
    toolChoice: { type: "tool", toolName: "weather" }, stopWhen: stepCountIs(2),
    maxOutputTokens: 200, maxRetries: 0,
    providerOptions: { penstock: { logit_bias: JSON.parse(process.env.LOGIT_BIAS), min_tokens: 1 } },
  };
  const rounds = (steps) => steps.map((step) => ({
    reason: step.finishReason,
    calls: step.toolCalls.map((call) => call.input),
    results: step.toolResults.map((result) => result.output),
  }));
  const whole = rounds((await generateText(fields)).steps);
  const streamed = streamText(fields);
  const inputs = {};
  for await (const part of streamed.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "tool-input-delta") inputs[part.id] = (inputs[part.id] ?? "") + part.delta;
  }
  const pieces = Object.values(inputs).map((text) => JSON.parse(text));
  return { whole, streamed: rounds(await streamed.steps), pieces };
}

// What an application sees of a refusal: of a whole answer, and of a stream.
async function aiSdkError(options, key) {
  const other = createOpenAICompatible({ name: "penstock", baseURL, apiKey: key });
  const fields = { model: other("demo"), prompt: "Hi", maxOutputTokens: 2, maxRetries: 0, ...options };
  const shown = (error) => ({
    status: error.statusCode, code: JSON.parse(error.responseBody).error.code,
    retry: error.isRetryable, message: error.message,
  });
  const found = [];
  try {
    found.push(await generateText(fields));
  } catch (error) {
    found.push(shown(error));
  }
  for await (const part of streamText({ ...fields, onError() {} }).fullStream) {
    if (part.type === "error") found.push(shown(part.error));
  }
  return found;
}

async function refusal() {
  try {
    await client.chat.completions.create({ model: "other", messages });
  } catch (error) {
    return { status: error.status, code: error.code };
  }
}

console.log(JSON.stringify({
  openaiChat: await openaiChat(),
  openaiResponses: await openaiResponses(),
  aiSdk: await aiSdk(),
  aiSdkTools: await aiSdkTools(),
  aiSdkErrors: {
    400: await aiSdkError({ temperature: 99 }, apiKey),
    401: await aiSdkError({}, "sk-penstock-wrong"),
    429: await aiSdkError({}, process.env.SPENT_KEY),
  },
  refusal: await refusal(),
}));
