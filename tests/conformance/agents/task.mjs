// What the agents of this folder in JavaScript share: the task on standard input, two tools, and the outcome on
// standard output.
import { text } from "node:stream/consumers";

export const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
export const MODEL = "policy";
export const STREAM = process.argv.includes("--stream");
export const RESPONSES = process.argv.includes("--responses");
export const SYSTEM = "You compute with tools. Answer with the number alone.";
const called = [];

export const tools = {
  multiply: { description: "Multiplies two numbers.", run: ({ a, b }) => (called.push("multiply"), a * b) },
  add: { description: "Adds two numbers.", run: ({ a, b }) => (called.push("add"), a + b) },
};

export async function question() {
  return JSON.parse(await text(process.stdin)).question;
}

export function finish(answer) {
  console.log(JSON.stringify({ answer: answer.trim(), called }));
}
