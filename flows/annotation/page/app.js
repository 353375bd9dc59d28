// Actions of the annotation page: corrections, answers, navigation and keys, on the state of view.js.
"use strict";

// --- corrections ---------------------------------------------------------------------------------------------------

function spoken() {
  const places = [];
  shown[0]?.histories.forEach((conversation, history) => conversation.messages.forEach((message, index) => {
    if (message.role === "assistant") places.push({ history, message: index });
  }));
  return places;
}

function step(by) {
  const places = spoken();
  if (mode !== "episodes" || !places.length) return;
  const index = places.findIndex((place) => same(place, chosen));
  chosen = places[Math.min(Math.max(index + by, 0), places.length - 1)];
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
    shown[0].tools.length || before.calls.length ? element("label", {}, "Tool calls, as JSON", calls) : null,
    element("div", { class: "row" },
      element("button", { class: "primary", onclick: () => saveCorrection(place, text.value, calls.value) }, "Save"),
      element("button", { onclick: () => dropCorrection(place) }, "Cancel"),
      element("span", { class: "faint small" }, "Ctrl+Enter saves, Esc cancels")));
}

function readCalls(text) {
  if (!text.trim()) return [];
  let list;
  try { list = JSON.parse(text); } catch (error) { throw new Error(`calls: not valid JSON: ${error.message}`); }
  if (!Array.isArray(list)) throw new Error("calls: expected a list");
  return list.map((call) => {
    if (typeof call?.name !== "string") throw new Error('calls: each call needs a "name"');
    const values = call.arguments ?? {};
    return { name: call.name, arguments: typeof values === "string" ? values : JSON.stringify(values) };
  });
}

const saveCorrection = guarded(async (place, text, calls) => {
  await ask("/api/answer", { kind: "correction", trajectory: current, ...place, text, calls: readCalls(calls) });
  delete drafts[draftKey(place)];
  editing = false;
  await refresh();
  await show();
  say("correction saved");
});

function dropCorrection(place) {
  delete drafts[draftKey(place)];
  editing = false;
  draw();
}

// --- answers -------------------------------------------------------------------------------------------------------

function keys() {
  const shortcuts = mode === "episodes"
    ? [["1–5", "score"], ["g b", "good, bad step"], ["c", "correct"], ["r", "judge"], ["n", "note"], ["u", "undo"], ["⏎", "next open"], ["?", "all keys"]]
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
      element("p", { class: "soft" }, "Hidden until you have scored, so that it does not bias you."),
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
  await afterSave(key, `scored ${value}`);
});

const choose = guarded(async (better) => {
  const key = current, one = item();
  if (mode !== "pairs" || !one) return;
  await ask("/api/answer", { kind: "choice", trajectory: one.a, other: one.b, better, note: notes[key] ?? "" });
  await afterSave(key, better === "tie" ? "a tie" : `${better.toUpperCase()} is better`);
});

const label = guarded(async (good, place = chosen) => {
  if (mode !== "episodes" || !place) return;
  chosen = place;
  await ask("/api/answer", { kind: "step", trajectory: current, ...place, good });
  await refresh();
  await show();
  say(`step labelled ${good ? "good" : "bad"}`);
});

async function afterSave(key, text) {
  delete notes[key];
  await refresh();
  await show();
  say(text);
}

const undo = guarded(async () => {
  const { undone } = await ask("/api/undo", {});
  await refresh();
  await show();
  say(undone ? `undone: ${undone.kind} of ${undone.trajectory}` : "there is nothing to undo");
});

const reveal = guarded(() => show(true));

// --- navigation ----------------------------------------------------------------------------------------------------

function move(by) {
  const list = items();
  const index = list.findIndex((entry) => keyOf(entry) === current);
  const next = list[Math.min(Math.max(index + by, 0), list.length - 1)];
  if (next && keyOf(next) !== current) go(keyOf(next));
}

function nextOpen() {
  const list = items();
  const index = list.findIndex((entry) => keyOf(entry) === current);
  const next = [...list.slice(index + 1), ...list.slice(0, index + 1)].find(isOpen);
  if (next) go(keyOf(next));
  else say("you have answered all of these");
}

const setMode = guarded(async (name) => {
  ++turn; // discard pending responses of the other mode
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
  a: () => choose("a"), b: () => (mode === "pairs" ? choose("b") : label(false)), g: () => label(true), t: () => choose("tie"), c: edit, n: () => byId("note")?.focus(),
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
  if (event.key === "Enter" && ["BUTTON", "SUMMARY"].includes(event.target.tagName)) return; // let it activate the focused element
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
  else say("the note is saved with your answer");
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
  history.replaceState(null, "", `/${location.hash}`); // the session is in the cookie now, so drop the token from the URL
  await refresh();
  await show();
})();
