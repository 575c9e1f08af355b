// One answer, from the question to its end, with what is known of every step and how long it took.

import { events } from "./stream.js";

export class Run {
  // body: what is sent. steps: in order, each with its own tokens. finish: why it ended, null until then.
  constructor(body) {
    this.body = body;
    this.text = "";
    this.steps = [];
    this.finish = null;
    this.seconds = null;
  }

  // changed: told of every piece of text and its tokens.
  async go(key, signal, changed = () => {}) {
    const start = performance.now();
    for await (const event of events(this.body, key, signal)) {
      for (const choice of event.choices) this.#take(choice, changed);
    }
    this.seconds = (performance.now() - start) / 1000;
    return this;
  }

  #take(choice, changed) {
    const text = choice.delta.content ?? "";
    const { tokens, steps } = choice.speculation ?? { tokens: [], steps: [] };
    for (const step of steps) this.steps.push({ ...step, tokens: [] });
    for (const token of tokens) this.steps[token.step - 1].tokens.push(token);
    this.text += text;
    this.finish = choice.finish_reason ?? this.finish;
    changed(text, tokens);
  }

  get ids() {
    return this.steps.flatMap((step) => step.tokens.map((token) => token.id));
  }

  // Pooled over the steps that are known whole: the last one's tokens may still be on their way.
  get figures() {
    const sum = (value) => this.steps.reduce((total, step) => total + value(step), 0);
    const committed = sum((step) => step.committed);
    const checked = sum((step) => step.checked);
    return {
      steps: this.steps.length,
      committed,
      rate: checked ? sum((step) => step.path.length) / checked : null,
      tau: this.steps.length ? committed / this.steps.length : null,
    };
  }
}
