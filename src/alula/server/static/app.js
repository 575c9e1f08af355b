// Puts the page together: what is asked, what comes back, and what is done about errors.

import { Answer, element } from "./answer.js";
import { Panel } from "./panel.js";
import { Run } from "./run.js";
import { ServerError, asked, headers } from "./stream.js";

const KEY = "alula.key";
const NUMBERS = ["temperature", "max_tokens", "seed", "nodes", "depth", "floor"];
const OF_TREES = ["nodes", "depth", "floor"];
const at = (id) => document.getElementById(id);
const log = at("log");
const panel = new Panel();

let name = "model";
let messages = [];
let answers = 0;
let chats = 0;
let pairs = [];
let last = null; // the answer that a comparison repeats
let running = null; // AbortController of what runs now

const key = () => sessionStorage.getItem(KEY);

// What was typed into the settings. Raises ServerError for what is no number.
function settings() {
  const found = {};
  for (const id of NUMBERS) {
    const typed = at(id).value.trim();
    if (!typed) continue;
    if (!Number.isFinite(Number(typed))) throw new ServerError(`${id}: give a number`, 400, id);
    found[id] = Number(typed);
  }
  return found;
}

function bodyOf(history) {
  const { nodes, depth, floor, ...rest } = settings();
  const speculation = { trace: true, nodes, depth, floor };
  if (!at("speculate").checked) speculation.off = true;
  // The server's own seeds have 63 bits, which JavaScript's numbers do not hold.
  rest.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  return { messages: history, stream: true, ...rest, speculation };
}

async function send(text) {
  clearErrors();
  const history = [...messages, { role: "user", content: text }];
  let body;
  try {
    body = bodyOf(history);
  } catch (error) {
    return complain(error);
  }
  at("intro")?.remove();
  at("prompt").value = "";
  grow();
  const question = said(text);
  pairs = [];
  panel.measured(pairs);
  const answer = new Answer(new Run(body), name, ++answers, choose);
  log.append(answer.article);
  const chat = chats;
  const finished = await listen(answer);
  if (chat !== chats) return;
  if (!finished && !answer.run.text) {
    question.remove();
    answer.article.remove();
    if (!at("prompt").value) at("prompt").value = text;
    grow();
    return;
  }
  messages = [...history, { role: "assistant", content: answer.run.text }];
  last = answer;
  at("measure").disabled = false;
}

function choose(answer, number) {
  panel.choose(answer, number);
}

// Streams an answer onto the page. Returns whether it came to its end.
async function listen(answer) {
  begin("Answering");
  try {
    await answer.run.go(key(), running.signal, (text, tokens) => {
      const follow = isAtEnd(answer);
      answer.add(text, tokens);
      panel.follow(answer);
      if (follow) answer.note.scrollIntoView({ block: "nearest" });
    });
    answer.ended(summary(answer.run));
    return true;
  } catch (error) {
    answer.ended(error.name === "AbortError" ? `Stopped. ${summary(answer.run)}` : summary(answer.run));
    if (error.name !== "AbortError") complain(error);
    return false;
  } finally {
    end(answer.note.textContent);
  }
}

function summary(run) {
  const { committed, steps } = run.figures;
  const parts = [`${committed} tokens in ${steps} steps`];
  if (run.seconds) parts.push(`${run.seconds.toFixed(2)} s`, `${(committed / run.seconds).toFixed(1)} tokens/s`);
  if (run.body.speculation.off) parts.push("speculation off");
  parts.push(`seed ${run.body.seed}`);
  if (run.finish === "length") parts.push("cut at the most tokens");
  if (run.finish === "abort") parts.push("ended by the server");
  return parts.join(" · ");
}

function isAtEnd(answer) {
  return answer.note.getBoundingClientRect().top < log.getBoundingClientRect().bottom + 60;
}

function said(text) {
  const article = element("article", "question");
  article.append(element("h3", "who", "You"), element("p", "words", text));
  log.append(article);
  article.scrollIntoView({ block: "nearest" });
  return article;
}

// Both ways once more, so that the prompt is cached for both; who goes first changes from pair to pair.
async function compare() {
  const { off, ...speculation } = last.run.body.speculation;
  const bodies = [
    { ...last.run.body, speculation: { trace: true, off: true } },
    { ...last.run.body, speculation },
  ];
  const order = pairs.length % 2 ? [1, 0] : [0, 1];
  const pair = [];
  clearErrors();
  begin("Comparing");
  try {
    for (const side of order) {
      at("same").textContent = side ? "Running with speculation …" : "Running without speculation …";
      pair[side] = await new Run(bodies[side]).go(key(), running.signal);
    }
    if (last) pairs.push(pair);
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  } finally {
    end("");
    panel.measured(pairs);
  }
}

function begin(what) {
  running = new AbortController();
  at("status").textContent = what;
  const had = document.activeElement === at("send");
  at("send").hidden = at("measure").disabled = true;
  at("stop").hidden = false;
  if (had) at("stop").focus();
}

function end(what) {
  const had = [at("stop"), at("measure"), document.body].includes(document.activeElement);
  running = null;
  at("status").textContent = what;
  at("send").hidden = false;
  at("stop").hidden = true;
  at("measure").disabled = last === null;
  if (had) at("prompt").focus();
}

function complain(error) {
  if (error.status === 401) return askForKey(key() ? "The server does not know this key" : null);
  const box = element("p", "error", error instanceof ServerError ? error.message : `The page failed: ${error.message}`);
  box.setAttribute("role", "alert");
  log.append(box);
  box.scrollIntoView({ block: "nearest" });
  const field = error.param && document.getElementById(error.param === "speculation" ? wrong(error) : error.param);
  if (!field || !NUMBERS.includes(field.id)) return;
  field.setAttribute("aria-invalid", "true");
  at("settings").open = true;
  field.focus();
}

// Which of the fields within `speculation` an error is about.
function wrong(error) {
  return OF_TREES.find((id) => error.message.includes(id)) ?? "speculation";
}

function clearErrors() {
  for (const box of log.querySelectorAll(".error")) box.remove();
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}

function askForKey(why) {
  at("key-form").hidden = false;
  if (why) at("key-note").textContent = `${why}. Give another one.`;
  at("key").value = "";
  at("key").focus();
}

// The name of what is served. Nothing is said of errors other than a missing key: asking will say them again.
async function meet() {
  try {
    const card = (await (await asked("v1/models", { headers: headers(key()) })).json()).data[0];
    name = card.id;
    const drafter = card.drafters.filter((each) => each !== "none").join(", ") || "no drafter";
    at("served").textContent = `${card.id} · ${drafter} · ${card.rule}`;
    at("key-form").hidden = true;
  } catch (error) {
    if (error.status === 401) complain(error);
  }
}

function tell() {
  const typed = (id) => at(id).value.trim();
  at("said").textContent = `temperature ${typed("temperature") || "server’s"}, ${typed("max_tokens") || "any number of"} tokens`;
}

function grow() {
  const field = at("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 200)}px`;
}

function submit() {
  const text = at("prompt").value;
  if (!running && text.trim()) send(text);
}

function startAnew() {
  running?.abort();
  chats += 1;
  messages = [];
  pairs = [];
  last = null;
  answers = 0;
  log.replaceChildren();
  panel.clear();
  at("measure").disabled = true;
  at("prompt").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
at("prompt").addEventListener("input", grow);
at("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  await meet();
  if (at("key-form").hidden) at("prompt").focus();
});
at("stop").addEventListener("click", () => running?.abort());
at("measure").addEventListener("click", compare);
at("fresh").addEventListener("click", startAnew);
at("settings").addEventListener("input", tell);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => !running && send(example.textContent));
}
tell();
meet();
at("prompt").focus();
