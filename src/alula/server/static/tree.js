// The draft tree of a step as a drawing: the root on the left, a column per depth.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 26;
const PITCH = 34;
const GAP = 28;
const LETTER = 7.3;
const SCORE = 26;
const LONGEST = 14;
const SMALLEST = 0.72; // of the full size, before a wide tree has to be scrolled
const MARKS = { root: "", accepted: "✓ ", refused: "✕ ", unreached: "", own: "◆ " };
const MEANS = {
  root: "root: the last token before this step",
  accepted: "accepted",
  refused: "checked and refused",
  unreached: "not reached",
  own: "the model’s own choice",
};

// White space and control characters as signs one can see.
export function visible(text) {
  const signs = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };
  return [...text].map((sign) => signs[sign] ?? (sign < " " ? "␣" : sign)).join("").replace(/^bytes:/, "");
}

// step: of a run, with its tokens.
export function draw(step) {
  const nodes = nodesOf(step);
  const [width, height] = place(nodes);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  svg.setAttribute("aria-label", spoken(step));
  svg.style.minWidth = `${SMALLEST * width}px`;
  for (const node of nodes.slice(1)) svg.append(edge(nodes[node.parent], node));
  for (const node of nodes) svg.append(box(node));
  return svg;
}

// What the drawing shows, in a sentence.
export function spoken(step) {
  const { tree, path, tokens, checked } = step;
  const quoted = (text) => `“${visible(text)}”`;
  const drafted = tree.tokens.length - 1;
  const own = tokens.find((token) => !token.drafted);
  const told = [
    drafted ? `${drafted} drafted after ${quoted(tree.texts[0])}, ${checked} checked` : "Nothing was drafted here",
  ];
  if (path.length) told.push(`accepted ${path.map((node) => quoted(tree.texts[node])).join(" ")}`);
  if (own) told.push(`then the model’s own ${quoted(own.text || "…")}`);
  return `${told.join("; ")}.`;
}

function nodesOf({ tree, path, tokens }) {
  const walked = new Set([0, ...path]);
  const own = tokens.find((token) => !token.drafted); // there is none where the output ended on the path
  const nodes = tree.texts.map((text, index) => {
    const parent = tree.parents[index];
    let kind = index ? "unreached" : "root";
    if (walked.has(index) && index) kind = "accepted";
    else if (walked.has(parent) && (own || parent !== path.at(-1))) kind = "refused";
    return { text, parent, kind, index, depth: tree.depths[index], score: index ? Math.exp(tree.scores[index]) : null };
  });
  if (own) {
    const parent = path.at(-1) ?? 0;
    nodes.push({ text: own.text, parent, kind: "own", index: -1, depth: nodes[parent].depth + 1, score: null });
  }
  return nodes;
}

// Sets left, middle and width of every node; returns the size of it all.
function place(nodes) {
  const columns = [];
  for (const node of nodes) {
    node.label = MARKS[node.kind] + shortened(visible(node.text || "…"));
    node.width = Math.ceil(18 + LETTER * [...node.label].length + (node.score === null ? 0 : SCORE));
    node.below = nodes.filter((other) => other !== node && nodes[other.parent] === node);
    columns[node.depth] = Math.max(columns[node.depth] ?? 0, node.width);
  }
  const starts = [2];
  for (const [depth, width] of columns.entries()) starts[depth + 1] = starts[depth] + width + GAP;
  let rows = 0;
  const settle = (node) => {
    node.left = starts[node.depth];
    node.below.forEach(settle);
    const [first, last] = [node.below[0], node.below.at(-1)];
    node.middle = first ? (first.middle + last.middle) / 2 : HEIGHT / 2 + 2 + PITCH * rows++;
  };
  settle(nodes[0]);
  return [starts.at(-1) - GAP + 2, PITCH * (rows - 1) + HEIGHT + 4];
}

function shortened(text) {
  const signs = [...text];
  return signs.length > LONGEST ? `${signs.slice(0, LONGEST - 1).join("")}…` : text;
}

function edge(from, to) {
  const [x, y] = [from.left + from.width, from.middle];
  const bend = (x + to.left) / 2;
  const way = `M${x} ${y}C${bend} ${y} ${bend} ${to.middle} ${to.left} ${to.middle}`;
  return make("path", { d: way, class: `edge ${to.kind}` });
}

function box(node) {
  const group = make("g", { class: `node ${node.kind}`, "data-node": node.index });
  const title = make("title");
  title.textContent = `${visible(node.text)}: ${MEANS[node.kind]}`;
  const round = node.kind === "own" ? HEIGHT / 2 : 5;
  const frame = { x: node.left, y: node.middle - HEIGHT / 2, width: node.width, height: HEIGHT, rx: round };
  group.append(title, make("rect", frame), label(node.left + 9, node.middle, node.label, "label"));
  if (node.score !== null) {
    group.append(label(node.left + node.width - 7, node.middle, node.score.toFixed(2), "score", "end"));
  }
  return group;
}

function label(x, middle, text, kind, anchor = "start") {
  const found = make("text", { x, y: middle + 4, class: kind, "text-anchor": anchor });
  found.textContent = text;
  return found;
}

function make(name, attributes = {}) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}
