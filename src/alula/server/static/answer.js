// An answer on the page: its tokens in the shade of their step, and the steps to choose from.
// Whatever the model writes is put in as text nodes, never as markup.

export function element(name, classes = "", text = "") {
  const found = document.createElement(name);
  if (classes) found.className = classes;
  if (text) found.textContent = text;
  return found;
}

export class Answer {
  // chosen(answer, step number): called when somebody picks a step.
  constructor(run, name, number, chosen) {
    this.run = run;
    this.step = 0;
    this.follows = true; // the panel shows the newest step until one is picked
    this.#chosen = chosen;
    this.article = element("article", "answer");
    this.article.append(element("h3", "who", name));
    this.body = element("div", "words");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `Answer ${number}. The left and right arrow keys choose a step.`);
    this.body.setAttribute("aria-busy", "true");
    this.note = element("p", "note");
    this.article.append(this.body, this.note);
    this.body.addEventListener("click", (event) => this.#clicked(event));
    this.body.addEventListener("keydown", (event) => this.#pressed(event));
    this.body.addEventListener("focus", () => this.step && this.#chosen(this, this.step));
  }

  #chosen;
  #spans = [];

  // Pieces of the tokens make up the text; one without tokens goes in as it is.
  add(text, tokens) {
    for (const token of tokens) {
      const span = element("span", token.drafted ? "drafted" : "own", token.text);
      this.#spanOf(token.step).append(span);
    }
    if (!tokens.length && text) this.body.append(text);
  }

  ended(note) {
    this.body.removeAttribute("aria-busy");
    this.note.textContent = note;
  }

  // number: 0 for none.
  mark(number) {
    this.#spans[this.step - 1]?.classList.remove("chosen");
    this.step = number;
    this.#spans[number - 1]?.classList.add("chosen");
  }

  #spanOf(number) {
    while (this.#spans.length < number) {
      const span = element("span", `step ${this.#spans.length % 2 ? "b" : "a"}`);
      span.dataset.step = String(this.#spans.length + 1);
      this.#spans.push(span);
      this.body.append(span);
    }
    return this.#spans[number - 1];
  }

  #clicked(event) {
    const span = event.target.closest(".step");
    if (span) this.#pick(Number(span.dataset.step));
  }

  #pressed(event) {
    const moves = { ArrowLeft: this.step - 1, ArrowRight: this.step + 1, Home: 1, End: this.#spans.length };
    if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.#pick(moves[event.key]);
    }
  }

  #pick(number) {
    if (!this.#spans.length) return;
    this.follows = false;
    this.#chosen(this, Math.min(Math.max(number, 1), this.#spans.length));
    this.#spans[this.step - 1].scrollIntoView({ block: "nearest" });
  }
}
