// The side of the page: figures of an answer, the tree of its chosen step, and the comparison with plain decoding.

import { element } from "./answer.js";
import { draw, spoken } from "./tree.js";

const MARGIN = 16;
const at = (id) => document.getElementById(id);
const digits = (value, count = 2) => (value === null ? "–" : value.toFixed(count));

export class Panel {
  // answer: the one that is looked at; null before there is any.
  constructor() {
    this.answer = null;
    this.empty = at("tree").firstElementChild;
    at("back").addEventListener("click", () => this.#move(-1));
    at("on").addEventListener("click", () => this.#move(1));
    at("slider").addEventListener("input", (event) => this.#pick(Number(event.target.value)));
  }

  #drawn = null;

  choose(answer, number) {
    if (this.answer !== answer) this.answer?.mark(0);
    this.answer = answer;
    answer.mark(number);
    this.#figures(answer.run);
    this.#show(answer.run, number);
  }

  // After news of an answer: its figures, and its newest step unless somebody picked one.
  follow(answer) {
    const count = answer.run.steps.length;
    if (count) this.choose(answer, answer.follows ? count : answer.step);
  }

  clear() {
    this.answer = null;
    for (const id of ["rate", "tau"]) at(id).textContent = "–";
    at("pooled").textContent = at("path").textContent = "";
    at("step-title").textContent = "Steps";
    for (const id of ["back", "on"]) at(id).disabled = true;
    for (const id of ["slider", "signs"]) at(id).hidden = true;
    at("tree").replaceChildren(this.empty);
    this.measured([]);
  }

  #pick(number) {
    this.answer.follows = false;
    this.choose(this.answer, number);
  }

  #move(by) {
    const count = this.answer.run.steps.length;
    this.#pick(Math.min(Math.max(this.answer.step + by, 1), count));
  }

  #figures(run) {
    const { steps, committed, rate, tau } = run.figures;
    at("rate").textContent = digits(rate);
    at("tau").textContent = digits(tau);
    at("pooled").textContent = `${committed} tokens in ${steps} steps, pooled`;
  }

  #show(run, number) {
    const step = run.steps[number - 1];
    const many = step.committed === 1 ? "1 token" : `${step.committed} tokens`;
    at("step-title").textContent = `Step ${number} of ${run.steps.length}: ${many}`;
    at("slider").max = String(run.steps.length);
    at("slider").value = String(number);
    for (const id of ["slider", "signs"]) at(id).hidden = false;
    at("slider").setAttribute("aria-valuetext", `Step ${number}, ${many}`);
    at("back").disabled = number === 1;
    at("on").disabled = number === run.steps.length;
    cancelAnimationFrame(this.#drawn);
    this.#drawn = requestAnimationFrame(() => {
      at("tree").replaceChildren(draw(step));
      reveal(at("tree"));
      at("path").textContent = spoken(step);
    });
  }

  // pairs: runs of the same question, [plain, with speculation] each.
  measured(pairs) {
    const total = (side) => pairs.reduce((sum, pair) => sum + pair[side].seconds, 0);
    at("bars").hidden = !pairs.length;
    at("speedup").classList.toggle("unmeasured", !pairs.length);
    at("speedup").textContent = pairs.length ? `${digits(total(0) / total(1))}×` : "not measured yet";
    at("same").textContent = pairs.length ? verdict(pairs) : "";
    at("same").classList.toggle("differs", pairs.some((pair) => !isSame(pair)));
    if (!pairs.length) return;
    const longest = Math.max(total(0), total(1));
    const tokens = pairs.map((pair) => pair.map((run) => run.ids.length));
    at("bars").replaceChildren(
      ...["Plain", "Speculative"].map((name, side) => {
        const count = tokens.reduce((sum, pair) => sum + pair[side], 0);
        return bar(name, total(side) / pairs.length, total(side) / longest, count / total(side));
      }),
    );
  }
}

// Scrolls the drawing no further than until the end of its path is seen.
function reveal(tree) {
  tree.scrollTo(0, 0);
  const end = [...tree.querySelectorAll(".node.root, .node.accepted, .node.own")].at(-1).getBoundingClientRect();
  const frame = tree.getBoundingClientRect();
  tree.scrollTo(Math.max(end.right - frame.right + MARGIN, 0), Math.max(end.bottom - frame.bottom + MARGIN, 0));
}

function bar(name, seconds, share, speed) {
  const row = element("div", "bar");
  const line = element("span", "line");
  line.style.width = `${(100 * share).toFixed(1)}%`; // set by script, which the policy allows
  const track = element("span", "track");
  track.append(line);
  row.append(element("span", "name", name), track);
  row.append(element("span", "value", `${digits(seconds)} s, ${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`));
  return row;
}

function isSame([plain, fast]) {
  return plain.text === fast.text && plain.ids.join() === fast.ids.join();
}

function verdict(pairs) {
  const count = pairs.at(-1)[0].ids.length;
  const runs = pairs.length === 1 ? "one run of each" : `${pairs.length} runs of each, by turns`;
  const same = pairs.every(isSame) ? `The same text, token for token: ${count} of ${count}` : "The texts differ";
  return `${same}; ${runs}, from question to last token.`;
}
