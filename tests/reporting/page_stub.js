// Runs the script of report.html (argument 1) with a stub of the DOM, and prints what each chart has drawn.
const page = require("fs").readFileSync(process.argv[2], "utf8"), width = Number(process.argv[3]);
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.attributes = {}; this.style = {setProperty() {}}; }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren() { this.children = []; }
  get all() { return this.children.flatMap((node) => [node, ...node.all]); }
  querySelector(name) { return this.all.find((node) => name === node.tag || name === `.${node.className}`); }
  matches() { return this.className === "wide"; }
  get clientWidth() { return width; }
}
const roots = {};
global.document = {
  createElementNS: (_, tag) => new Node(tag),
  createElement: (tag) => new Node(tag),
  querySelector: (name) => roots[name] ??= new Node(name),
  querySelectorAll: (tag) => Object.values(roots).flatMap((root) => root.all).filter((node) => node.tag === tag),
};
global.ResizeObserver = class { constructor(draw) { this.observe = draw; } };
(0, eval)(page.match(/<script>([^]*)<\/script>/)[1]);
console.log(JSON.stringify(roots[".charts"].children.map((chart) => {
  const nodes = chart.querySelector("svg").all, labels = nodes.filter((node) => node.attributes.class === "label");
  const bad = nodes.filter((node) => /NaN|undefined/.test(Object.values(node.attributes).join()));
  return {title: chart.querySelector("figcaption").textContent, labels: labels.map((node) => node.textContent),
    places: labels.map((node) => [Number(node.attributes.x), Number(node.attributes.y)]), bad: bad.length,
    paths: nodes.filter((node) => node.tag === "path").length, ticks: nodes.filter((node) => node.tag === "text"
      && node.attributes["text-anchor"] === "end").map((node) => node.textContent)};
})));
