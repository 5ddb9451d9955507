// OpenAI's own client for Node.js and Vercel's AI SDK, unchanged; prints what they got as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const baseURL = process.env.BASE_URL;
const messages = [{ role: "user", content: "What is a mapping?" }];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

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
  const provider = createOpenAICompatible({ name: "penstock", baseURL, apiKey: "none" });
  const fields = {
    model: provider("demo"), prompt: "What is a mapping?", maxOutputTokens: 12, temperature: 0,
  };
  const whole = await generateText(fields);
  let text = "";
  for await (const part of streamText(fields).textStream) text += part;
  return { whole: whole.text, streamed: text };
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
  refusal: await refusal(),
}));
