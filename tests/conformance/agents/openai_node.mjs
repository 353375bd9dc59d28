// The openai package of npm: a loop over chat completions with tools, streamed or not.
import OpenAI from "openai";

import { apiKey, baseURL, finish, MODEL, question, STREAM, SYSTEM, tools } from "./task.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const number = { type: "integer" };
const parameters = { type: "object", properties: { a: number, b: number }, required: ["a", "b"] };
const described = Object.entries(tools).map(([name, { description }]) => ({
  type: "function",
  function: { name, description, parameters },
}));
const messages = [
  { role: "system", content: SYSTEM },
  { role: "user", content: await question() },
];

for (;;) {
  const request = { model: MODEL, messages, tools: described };
  const completion = STREAM
    ? await client.chat.completions.stream(request).finalChatCompletion()
    : await client.chat.completions.create(request);
  const { message } = completion.choices[0];
  messages.push(message);
  if (!message.tool_calls?.length) {
    finish(message.content);
    break;
  }
  for (const call of message.tool_calls) {
    const content = String(tools[call.function.name].run(JSON.parse(call.function.arguments)));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
