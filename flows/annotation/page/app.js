// The annotation page. What episodes say is only ever set as text (textContent), never as markup.
"use strict";

const FILTERS = { all: "All", open: "Open", success: "Solved", unsolved: "Not solved", failed: "Failed" };
const STATUS = { success: "solved", unsolved: "not solved", failed: "failed" };
const byId = (id) => document.getElementById(id);

let state = null; // what there is to do
let mode = "episodes"; // or pairs
let filter = "all";
let current = null; // key of what is shown
let shown = []; // its episodes: one, or the two sides
let chosen = null; // {history, message} of the assistant's message that c corrects
let editing = false;
let notes = {}; // notes that are not kept yet, by key
let drafts = {}; // corrections that are not kept yet
let turn = 0; // of the latest request to show something
let asked = 0; // and of that for what there is to do

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

async function ask(path, data) {
  const options = data === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(data),
  };
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Error("the server does not answer: was the command ended?");
  }
  const found = await answer.json().catch(() => ({ error: `HTTP ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error);
  return found;
}

let fading;
function say(text, error = false) {
  const toast = byId("toast");
  toast.textContent = text;
  toast.className = error ? "shown error" : "shown";
  clearTimeout(fading);
  fading = setTimeout(() => { toast.className = ""; }, error ? 6000 : 1800);
}

const guarded = (work) => (...given) => work(...given).catch((error) => say(error.message, true));

// --- what there is -------------------------------------------------------------------------------------------------

const keyOf = (item) => (item.id !== undefined ? item.id : JSON.stringify([item.a, item.b]));
const isOpen = (item) => (item.id !== undefined ? item.score === null : item.better === null);
const statusOf = (id) => state.episodes.find((one) => one.id === id);

function items(all = false) {
  const found = mode === "episodes" ? state.episodes : state.pairs;
  if (all || filter === "all") return found;
  if (filter === "open") return found.filter((item) => isOpen(item) || keyOf(item) === current);
  return found.filter((item) => (item.id !== undefined
    ? item.status === filter
    : [item.a, item.b].some((id) => statusOf(id)?.status === filter)));
}

const item = () => items(true).find((one) => keyOf(one) === current);

async function refresh() {
  const own = ++asked;
  const answer = await ask("/api/state");
  if (own === asked) state = answer; // a later answer knows more
  const found = items();
  if (!found.some((one) => keyOf(one) === current)) {
    const next = found.find(isOpen) ?? found[0];
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
    const said = pair ? { a: "A", b: "B", tie: "=" }[one.better] ?? "" : `${one.corrections ? "✎ " : ""}${one.score ?? ""}`;
    return element("li", {}, element("button",
      { "aria-current": String(keyOf(one) === current), title: label, onclick: () => go(keyOf(one)) },
      element("span", { class: `dot ${pair ? "pair" : one.status}` }),
      element("span", { class: "label" }, label),
      element("span", { class: "said" }, said)));
  }));
  byId("items").querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
}

// --- what is shown -------------------------------------------------------------------------------------------------

const go = guarded(async (key) => {
  current = key;
  chosen = null;
  editing = false;
  await show();
  scrollTo(0, 0);
});

async function show(reveal = false) {
  const own = ++turn;
  const one = item();
  const ids = !one ? [] : one.id !== undefined ? [one.id] : [one.a, one.b];
  const found = await Promise.all(ids.map((id) => ask(`/api/episode?id=${encodeURIComponent(id)}&reveal=${reveal}`)));
  if (own !== turn) return; // something else was asked for meanwhile
  shown = found;
  if (mode === "episodes" && shown.length && chosen === null) chosen = spoken().at(-1) ?? null;
  history.replaceState(null, "", current === null ? "/" : `/#${mode}=${encodeURIComponent(current)}`);
  draw();
}

function draw() {
  drawFrame();
  const main = byId("main");
  if (!shown.length) {
    const text = mode === "pairs" && !state.pairs.length ? "No scenario has two finished episodes to compare." : "Nothing here with this filter.";
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
  one.histories.forEach((found, history) => {
    if (one.histories.length > 1) parts.push(element("div", { class: "agent" }, `Agent: ${found.agent}`));
    found.messages.forEach((said, message) => parts.push(messageOf(one, said, { history, message }, alone)));
  });
  return element("div", { class: "card talk" }, ...parts);
}

function said(text, calls) {
  return [
    text ? element("div", { class: "text", dir: "auto" }, text) : null,
    ...calls.map((call) => element("span", { class: "call" }, element("b", {}, call.name), `(${call.arguments})`)),
    !text && !calls.length ? element("div", { class: "faint" }, "(empty)") : null,
  ].filter(Boolean);
}

const same = (one, other) => one && other && one.history === other.history && one.message === other.message;

function messageOf(one, message, place, alone) {
  const correction = one.corrections.find((found) => same(found, place));
  const mine = alone && message.role === "assistant";
  const here = mine && same(chosen, place);
  const classes = ["message", message.role, here ? "chosen" : "", correction && alone ? "corrected" : ""].join(" ");
  const who = element("div", { class: "who" }, message.role === "tool" ? "tool result" : message.role,
    message.cut ? element("span", { class: "faint" }, "cut off") : null,
    mine ? element("button", { class: "correct", onclick: () => { chosen = place; edit(); } }, correction ? "change" : "correct") : null);
  const made = element("div", { class: classes }, who, ...said(message.content, message.calls));
  if (mine) made.addEventListener("click", () => { if (!same(chosen, place) && !editing) { chosen = place; draw(); } });
  if (correction && alone && !(here && editing)) {
    made.append(element("div", { class: "correction" }, element("div", { class: "who" }, "your correction"), ...said(correction.text, correction.calls)));
  }
  if (here && editing) made.append(editor(message, correction, place));
  return made;
}

// --- corrections ---------------------------------------------------------------------------------------------------

function spoken() {
  const found = [];
  shown[0]?.histories.forEach((one, history) => one.messages.forEach((message, index) => {
    if (message.role === "assistant") found.push({ history, message: index });
  }));
  return found;
}

function step(by) {
  const places = spoken();
  if (mode !== "episodes" || !places.length) return;
  const now = places.findIndex((place) => same(place, chosen));
  chosen = places[Math.min(Math.max(now + by, 0), places.length - 1)];
  draw();
  document.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
}

function edit() {
  if (mode !== "episodes" || !chosen) return;
  editing = true;
  draw();
  document.querySelector(".editor textarea")?.focus();
}

const draftKey = (place) => JSON.stringify([current, place.history, place.message]);
const asJson = (calls) => JSON.stringify(calls.map((call) => {
  try { return { name: call.name, arguments: JSON.parse(call.arguments) }; } catch { return call; }
}), null, 2);

function editor(message, correction, place) {
  const before = correction ?? { text: message.content, calls: message.calls };
  const draft = drafts[draftKey(place)] ?? { text: before.text, calls: before.calls.length ? asJson(before.calls) : "" };
  const text = element("textarea", { id: "correction", rows: Math.min(14, 3 + draft.text.split("\n").length), spellcheck: "true" });
  text.value = draft.text;
  const calls = element("textarea", { id: "correction-calls", class: "calls", rows: Math.min(12, 1 + draft.calls.split("\n").length), spellcheck: "false",
    placeholder: '[{"name": "look_up", "arguments": {"id": "A7"}}]' });
  calls.value = draft.calls;
  const keep = () => { drafts[draftKey(place)] = { text: text.value, calls: calls.value }; };
  text.addEventListener("input", keep);
  calls.addEventListener("input", keep);
  return element("div", { class: "editor" },
    element("label", {}, "What should the assistant have said?", text),
    shown[0].tools.length || before.calls.length ? element("label", {}, "Calls of tools, as JSON", calls) : null,
    element("div", { class: "row" },
      element("button", { class: "primary", onclick: () => saveCorrection(place, text.value, calls.value) }, "Keep"),
      element("button", { onclick: () => dropCorrection(place) }, "Cancel"),
      element("span", { class: "faint small" }, "Ctrl+Enter keeps, Esc cancels")));
}

function readCalls(text) {
  if (!text.trim()) return [];
  let found;
  try { found = JSON.parse(text); } catch (error) { throw new Error(`calls: no JSON: ${error.message}`); }
  if (!Array.isArray(found)) throw new Error("calls: expected a list");
  return found.map((call) => {
    if (typeof call?.name !== "string") throw new Error('calls: each needs a "name"');
    const given = call.arguments ?? {};
    return { name: call.name, arguments: typeof given === "string" ? given : JSON.stringify(given) };
  });
}

const saveCorrection = guarded(async (place, text, calls) => {
  await ask("/api/answer", { kind: "correction", trajectory: current, ...place, text, calls: readCalls(calls) });
  delete drafts[draftKey(place)];
  editing = false;
  await refresh();
  await show();
  say("correction kept");
});

function dropCorrection(place) {
  delete drafts[draftKey(place)];
  editing = false;
  draw();
}

// --- answers -------------------------------------------------------------------------------------------------------

function keys() {
  const shortcuts = mode === "episodes"
    ? [["1–5", "score"], ["c", "correct"], ["r", "judge"], ["n", "note"], ["u", "undo"], ["⏎", "next open"], ["?", "all keys"]]
    : [["a", "A"], ["b", "B"], ["t", "tie"], ["n", "note"], ["u", "undo"], ["⏎", "next open"], ["?", "all keys"]];
  return element("div", { class: "keys" }, ...shortcuts.map(([key, what]) => element("span", {}, element("kbd", {}, key), ` ${what}`)));
}

function panel() {
  const note = element("textarea", { id: "note", placeholder: "Note (n)", "aria-label": "Note" });
  note.value = notes[current] ?? shown[0].note ?? "";
  if (mode === "pairs") note.value = notes[current] ?? "";
  note.addEventListener("input", () => { notes[current] = note.value; });
  const parts = mode === "episodes" ? [scoreCard(note), judgeCard()] : [choiceCard(note)];
  if (state.mlflow) parts.push(element("div", { class: "away" }, state.mlflow));
  return [...parts.filter(Boolean), keys()];
}

function scoreCard(note) {
  const own = shown[0].score;
  return element("section", { class: "card" }, element("h2", {}, "How good is this episode?"),
    element("div", { class: "scores" }, ...[1, 2, 3, 4, 5].map((value) =>
      element("button", { "aria-pressed": String(own === value), "data-score": value, onclick: () => score(value) }, String(value)))),
    element("div", { class: "ends" }, element("span", {}, "bad"), element("span", {}, "good")), note);
}

function choiceCard(note) {
  const better = item()?.better;
  const button = (value, title) => element("button",
    { "aria-pressed": String(better === value), "data-better": value, onclick: () => choose(value) }, title);
  return element("section", { class: "card" }, element("h2", {}, "Which one is better?"),
    element("div", { class: "choices" }, button("a", "A"), button("b", "B"), button("tie", "tie")), note);
}

function judgeCard() {
  const one = shown[0];
  if (!one.has_judge) return null;
  if (!one.judge) {
    return element("section", { class: "card judge" }, element("h2", {}, "The judge"),
      element("p", { class: "soft" }, "Hidden until you have scored, so that it does not lead you."),
      element("button", { class: "quiet", id: "reveal", onclick: () => reveal() }, "Show it now (r)"));
  }
  const parts = Object.entries(one.judge.components).flatMap(([name, value]) => [element("span", {}, name), element("span", {}, value)]);
  return element("section", { class: "card judge" }, element("h2", {}, "The judge"),
    element("div", { class: "value" }, one.judge.reward), element("div", { class: "parts" }, ...parts),
    one.judge.explanation ? element("div", { class: "why" }, one.judge.explanation) : null);
}

const score = guarded(async (value) => {
  const key = current;
  if (mode !== "episodes" || !key) return;
  await ask("/api/answer", { kind: "score", trajectory: key, score: value, note: notes[key] ?? shown[0].note ?? "" });
  await kept(key, `scored ${value}`);
});

const choose = guarded(async (better) => {
  const key = current, one = item();
  if (mode !== "pairs" || !one) return;
  await ask("/api/answer", { kind: "choice", trajectory: one.a, other: one.b, better, note: notes[key] ?? "" });
  await kept(key, better === "tie" ? "a tie" : `${better.toUpperCase()} is better`);
});

async function kept(key, text) {
  delete notes[key];
  await refresh();
  await show();
  say(text);
}

const undo = guarded(async () => {
  const { undone } = await ask("/api/undo", {});
  await refresh();
  await show();
  say(undone ? `taken back: ${undone.kind} of ${undone.trajectory}` : "there is nothing to take back");
});

const reveal = guarded(() => show(true));

// --- ways to go ----------------------------------------------------------------------------------------------------

function move(by) {
  const found = items();
  const now = found.findIndex((one) => keyOf(one) === current);
  const next = found[Math.min(Math.max(now + by, 0), found.length - 1)];
  if (next && keyOf(next) !== current) go(keyOf(next));
}

function nextOpen() {
  const found = items();
  const now = found.findIndex((one) => keyOf(one) === current);
  const next = [...found.slice(now + 1), ...found.slice(0, now + 1)].find(isOpen);
  if (next) go(keyOf(next));
  else say("all of these have your answer");
}

const setMode = guarded(async (name) => {
  ++turn; // what is on its way was asked for in the other mode
  mode = name;
  current = null;
  chosen = null;
  editing = false;
  await refresh();
  await show();
});

const setFilter = guarded(async (name) => {
  filter = name;
  chosen = null;
  editing = false;
  await refresh();
  await show();
});

const KEYS = {
  j: () => move(1), ArrowRight: () => move(1), k: () => move(-1), ArrowLeft: () => move(-1), Enter: nextOpen,
  a: () => choose("a"), b: () => choose("b"), t: () => choose("tie"), c: edit, n: () => byId("note")?.focus(),
  r: () => reveal(), u: () => undo(), p: () => setMode(mode === "episodes" ? "pairs" : "episodes"),
  f: () => { const names = Object.keys(FILTERS); setFilter(names[(names.indexOf(filter) + 1) % names.length]); },
  "[": () => step(-1), "]": () => step(1), "?": () => byId("help").showModal(),
};
for (const value of [1, 2, 3, 4, 5]) KEYS[value] = () => score(value);

document.addEventListener("keydown", (event) => {
  if (byId("help").open) return;
  const writing = ["TEXTAREA", "INPUT"].includes(event.target.tagName);
  if (writing) {
    if (event.key === "Escape") {
      event.preventDefault();
      if (editing && event.target.closest(".editor")) dropCorrection(chosen);
      else event.target.blur();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (event.target.closest(".editor")) saveCorrection(chosen, byId("correction").value, byId("correction-calls")?.value ?? "");
      else keepNote();
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || !state) return;
  if (event.key === "Enter" && ["BUTTON", "SUMMARY"].includes(event.target.tagName)) return; // it presses that
  const work = KEYS[event.key];
  if (work) {
    event.preventDefault();
    work();
  }
});

function keepNote() {
  byId("note").blur();
  if (mode === "episodes" && shown[0]?.score) score(shown[0].score);
  else if (mode === "pairs" && item()?.better) choose(item().better);
  else say("the note is kept with your answer");
}

byId("mode-episodes").addEventListener("click", () => setMode("episodes"));
byId("mode-pairs").addEventListener("click", () => setMode("pairs"));
byId("help-button").addEventListener("click", () => byId("help").showModal());

guarded(async () => {
  const [name, key] = location.hash.slice(1).split("=");
  if (["episodes", "pairs"].includes(name) && key) {
    mode = name;
    current = decodeURIComponent(key);
  }
  history.replaceState(null, "", `/${location.hash}`); // the token is in a cookie from now on
  await refresh();
  await show();
})();
