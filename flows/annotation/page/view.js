// State and views of the annotation page. Content of episodes is only ever set as text (textContent), never as markup.
"use strict";

const FILTERS = { all: "All", open: "Open", success: "Solved", unsolved: "Not solved", failed: "Failed" };
const STATUS = { success: "solved", unsolved: "not solved", failed: "failed" };
const byId = (id) => document.getElementById(id);

let state = null; // episodes, pairs and answers, from /api/state
let mode = "episodes"; // or pairs
let filter = "all";
let current = null; // key of the shown episode or pair
let shown = []; // its episodes: one, or the two sides
let chosen = null; // {history, message} of the assistant's message that key c corrects, and g and b label
let editing = false;
let notes = {}; // unsaved notes, by key
let drafts = {}; // unsaved corrections
let turn = 0; // number of the latest request for episodes
let asked = 0; // number of the latest request for the state

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

async function ask(path, data) {
  const options = data === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(data),
  };
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Error("the server does not answer; is the command still running?");
  }
  const result = await response.json().catch(() => ({ error: `HTTP ${response.status}` }));
  if (!response.ok) throw new Error(result.error);
  return result;
}

let fading;
function say(text, error = false) {
  const toast = byId("toast");
  toast.textContent = text;
  toast.className = error ? "shown error" : "shown";
  clearTimeout(fading);
  fading = setTimeout(() => { toast.className = ""; }, error ? 6000 : 1800);
}

const guarded = (work) => (...values) => work(...values).catch((error) => say(error.message, true));

// --- state and lists -------------------------------------------------------------------------------------------------

const keyOf = (item) => (item.id !== undefined ? item.id : JSON.stringify([item.a, item.b]));
const isOpen = (item) => (item.id !== undefined ? item.score === null : item.better === null);
const statusOf = (id) => state.episodes.find((episode) => episode.id === id);

function items(all = false) {
  const list = mode === "episodes" ? state.episodes : state.pairs;
  if (all || filter === "all") return list;
  if (filter === "open") return list.filter((item) => isOpen(item) || keyOf(item) === current);
  return list.filter((item) => (item.id !== undefined
    ? item.status === filter
    : [item.a, item.b].some((id) => statusOf(id)?.status === filter)));
}

const item = () => items(true).find((entry) => keyOf(entry) === current);

async function refresh() {
  const own = ++asked;
  const response = await ask("/api/state");
  if (own === asked) state = response; // ignore responses that arrive out of order
  const list = items();
  if (!list.some((entry) => keyOf(entry) === current)) {
    const next = list.find(isOpen) ?? list[0];
    current = next ? keyOf(next) : null;
  }
}

function drawFrame() {
  byId("run").textContent = `${state.name} · ${state.run} · ${state.stage}`;
  byId("author").textContent = state.author;
  for (const [name, list] of [["episodes", state.episodes], ["pairs", state.pairs]]) {
    const tab = byId(`mode-${name}`);
    tab.setAttribute("aria-selected", String(mode === name));
    tab.querySelector("span").textContent = `${list.filter((one) => !isOpen(one)).length}/${list.length}`;
  }
  const all = items(true);
  byId("bar").style.width = `${all.length ? (100 * all.filter((one) => !isOpen(one)).length) / all.length : 0}%`;
  byId("filters").replaceChildren(...Object.entries(FILTERS).map(([name, title]) =>
    element("button", { "aria-pressed": String(filter === name), "data-filter": name, onclick: () => setFilter(name) }, title)));
  byId("items").replaceChildren(...items().map((one) => {
    const pair = one.id === undefined;
    const label = pair ? `${statusOf(one.a).scenario} · ${statusOf(one.a).sample} | ${statusOf(one.b).sample}` : one.id;
    const mark = pair ? { a: "A", b: "B", tie: "=" }[one.better] ?? "" : `${one.corrections ? "✎ " : ""}${one.score ?? ""}`;
    return element("li", {}, element("button",
      { "aria-current": String(keyOf(one) === current), title: label, onclick: () => go(keyOf(one)) },
      element("span", { class: `dot ${pair ? "pair" : one.status}` }),
      element("span", { class: "label" }, label),
      element("span", { class: "said" }, mark)));
  }));
  byId("items").querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
}

// --- main view -------------------------------------------------------------------------------------------------

const go = guarded(async (key) => {
  current = key;
  chosen = null;
  editing = false;
  await show();
  scrollTo(0, 0);
});

async function show(reveal = false) {
  const own = ++turn;
  const entry = item();
  const ids = !entry ? [] : entry.id !== undefined ? [entry.id] : [entry.a, entry.b];
  const episodes = await Promise.all(ids.map((id) => ask(`/api/episode?id=${encodeURIComponent(id)}&reveal=${reveal}`)));
  if (own !== turn) return; // a later request replaced this one
  shown = episodes;
  if (mode === "episodes" && shown.length && chosen === null) chosen = spoken().at(-1) ?? null;
  history.replaceState(null, "", current === null ? "/" : `/#${mode}=${encodeURIComponent(current)}`);
  draw();
}

function draw() {
  drawFrame();
  const main = byId("main");
  if (!shown.length) {
    const text = mode === "pairs" && !state.pairs.length ? "No scenario has two finished episodes to compare." : "No entry matches this filter.";
    main.replaceChildren(element("div", { class: "empty" }, element("h1", {}, "Nothing to read"), text));
    byId("panel").replaceChildren(keys());
    return;
  }
  main.replaceChildren(...(mode === "episodes" ? oneEpisode(shown[0]) : twoEpisodes()));
  byId("panel").replaceChildren(...panel());
}

function about(one) {
  const status = one.failure ? "failed" : one.success ? "success" : "unsolved";
  const facts = [one.type, one.difficulty ? `difficulty ${one.difficulty}` : "", one.split, one.policy.slice(0, 12)];
  return element("div", { class: "about" }, element("span", { class: `badge ${status}` }, STATUS[status]),
    ...facts.filter(Boolean).map((text) => element("span", {}, text)));
}

function oneEpisode(one) {
  return [
    element("h1", {}, one.scenario), about(one),
    one.failure ? element("div", { class: "failure" }, one.failure) : null,
    talk(one, true),
    fold("Outcome", [one.outcome], true),
    one.tools.length ? fold(`Tools (${one.tools.length})`, one.tools) : null,
  ].filter(Boolean);
}

function twoEpisodes() {
  const better = item()?.better;
  const sides = shown.map((one, place) => {
    const name = "ab"[place];
    return element("section", { class: `side ${better === name ? "better" : ""}`, "data-side": name },
      element("h2", {}, element("i", {}, name.toUpperCase()), `sample ${one.sample}`),
      talk(one, false), fold("Outcome", [one.outcome]));
  });
  return [element("h1", {}, shown[0].scenario),
    element("div", { class: "about" }, element("span", {}, "Which one is better?")), element("div", { class: "sides" }, ...sides)];
}

function fold(title, texts, open = false) {
  return element("details", { class: "card", open: open ? "" : null }, element("summary", {}, title),
    ...texts.map((text) => element("pre", {}, text)));
}

function talk(one, alone) {
  const parts = [];
  one.histories.forEach((conversation, history) => {
    if (one.histories.length > 1) parts.push(element("div", { class: "agent" }, `Agent: ${conversation.agent}`));
    conversation.messages.forEach((content, message) => parts.push(messageOf(one, content, { history, message }, alone)));
  });
  return element("div", { class: "card talk" }, ...parts);
}

function contentOf(text, calls) {
  return [
    text ? element("div", { class: "text", dir: "auto" }, text) : null,
    ...calls.map((call) => element("span", { class: "call" }, element("b", {}, call.name), `(${call.arguments})`)),
    !text && !calls.length ? element("div", { class: "faint" }, "(empty)") : null,
  ].filter(Boolean);
}

const labelOf = (one, place) => one.steps.find((entry) => same(entry, place))?.good;

const same = (one, other) => one && other && one.history === other.history && one.message === other.message;

function messageOf(one, message, place, alone) {
  const correction = one.corrections.find((entry) => same(entry, place));
  const editable = alone && message.role === "assistant";
  const selected = editable && same(chosen, place);
  const classes = ["message", message.role, selected ? "chosen" : "", correction && alone ? "corrected" : ""].join(" ");
  const who = element("div", { class: "who" }, message.role === "tool" ? "tool result" : message.role,
    message.cut ? element("span", { class: "faint" }, "cut off") : null,
    ...(editable ? [true, false].map((good) => element("button", { class: "mark", "data-good": String(good),
      "aria-pressed": String(labelOf(one, place) === good), onclick: () => label(good, place) }, good ? "good" : "bad")) : []),
    editable ? element("button", { class: "correct", onclick: () => { chosen = place; edit(); } }, correction ? "change" : "correct") : null);
  const reasoning = message.reasoning ? [element("details", {}, element("summary", {}, "Reasoning"),
    element("div", { class: "text", dir: "auto" }, message.reasoning))] : [];
  const node = element("div", { class: classes }, who, ...reasoning, ...contentOf(message.content, message.calls));
  if (editable) node.addEventListener("click", () => { if (!same(chosen, place) && !editing) { chosen = place; draw(); } });
  if (correction && alone && !(selected && editing)) {
    node.append(element("div", { class: "correction" }, element("div", { class: "who" }, "your correction"), ...contentOf(correction.text, correction.calls)));
  }
  if (selected && editing) node.append(editor(message, correction, place));
  return node;
}
