// The page "Plan in the browser": shows cells of plan_table.json, which the build puts into the page.
"use strict";

const table = JSON.parse(document.getElementById("plan-table").textContent);
const form = document.getElementById("plan-form");
const models = Object.keys(table.cells), cards = Object.keys(table.cards), ways = Object.keys(table.ways);

function element(name, text, attributes = {}) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...[text].flat());
  return made;
}

function duration(seconds) {
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

function count(tokens) {
  const [size, name] = tokens < 1e9 ? [1e6, "million"] : [1e9, "billion"];
  return `${Number((tokens / size).toPrecision(2))} ${name}`;
}

function chosen() {
  const [card, host, way] = [form.card.selectedIndex, Number(form.host.value), form.way.selectedIndex];
  return { model: form.model.value, card, host, way, tokens: 10 ** Number(form.tokens.value) };
}

function command({ model, card, host, way }) {
  const flags = `--model preset:${model} ${table.cards[cards[card]]} --host-mem-gib ${table.hosts_gib[host]}`;
  return `flexengine plan ${flags} ${table.ways[ways[way]]} ${table.step}`;
}

function answer(asked) {
  const cell = table.cells[asked.model][asked.card][asked.host][asked.way];
  if (cell.fits_with) {
    const remedies = cell.fits_with.map((flags) => element("li", element("code", flags)));
    const then = remedies.length ? [element("p", "What would fit:"), element("ul", remedies)] : [];
    return [element("p", element("strong", "Does not fit.")), ...then];
  }
  const speed = `${cell.tokens_per_s.toLocaleString("en")} tokens/s`;
  const time = `${count(asked.tokens)} tokens in ${duration(asked.tokens / cell.tokens_per_s)}`;
  return [
    element("p", [element("strong", speed), ` predicted: ${time}`], { className: "plan-speed" }),
    element("p", `GPU memory ${cell.gpu_gib} GiB, host memory ${cell.host_gib} GiB. Limited by ${cell.limited_by}.`),
  ];
}

function everyModel({ card, host }) {
  const head = element("tr", ["model", ...ways].map((name) => element("th", name, { scope: "col" })));
  const rows = models.map((model) => {
    const cells = table.cells[model][card][host].map((cell) =>
      element("td", cell.fits_with ? "does not fit" : cell.tokens_per_s.toLocaleString("en")));
    return element("tr", [element("th", model, { scope: "row" }), ...cells]);
  });
  const caption = `Predicted tokens/s on ${cards[card]} with ${table.hosts_gib[host]} GiB of host memory`;
  return element("table", [element("caption", caption), element("thead", head), element("tbody", rows)]);
}

function show() {
  const asked = chosen();
  form.host_text.value = `${table.hosts_gib[asked.host]} GiB`;
  form.tokens_text.value = count(asked.tokens);
  const shell = element("pre", element("code", command(asked)), { tabIndex: 0 });
  document.getElementById("plan-answer").replaceChildren(...answer(asked), shell);
  document.getElementById("plan-all").replaceChildren(everyModel(asked));
}

for (const [name, values] of Object.entries({ model: models, card: cards, way: ways })) {
  form[name].replaceChildren(...values.map((value) => element("option", value)));
}
form.host.max = table.hosts_gib.length - 1;
[form.model.value, form.card.selectedIndex, form.host.value] = ["llama-3.1-8b", 1, 1];
form.addEventListener("input", show);
show();
