// Vercel's AI SDK: chat completions by @ai-sdk/openai-compatible, responses by @ai-sdk/openai.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { apiKey, baseURL, finish, MODEL, question, RESPONSES, STREAM, SYSTEM, tools } from "./task.mjs";

const model = RESPONSES
  ? createOpenAI({ baseURL, apiKey }).responses(MODEL)
  : createOpenAICompatible({ name: "espalier", baseURL, apiKey })(MODEL);
const inputSchema = z.object({ a: z.number(), b: z.number() });
const described = Object.fromEntries(
  Object.entries(tools).map(([name, { description, run }]) => [
    name,
    tool({ description, inputSchema, execute: async (given) => String(run(given)) }),
  ]),
);
const options = {
  model,
  system: SYSTEM,
  prompt: await question(),
  tools: described,
  stopWhen: stepCountIs(6),
  maxRetries: 0,
};
if (STREAM) {
  let failure;
  const result = streamText({ ...options, onError: ({ error }) => (failure = error) });
  await result.consumeStream();
  if (failure) throw failure;
  finish(await result.text);
} else {
  finish((await generateText(options)).text);
}
