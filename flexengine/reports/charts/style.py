"""Style sheet, script and colours of the HTML reports; they load nothing from the network."""

CSS = """
:root { color-scheme: light dark; --ink: #1a1d23; --soft: #5b6472; --line: #d9dde4; --page: #ffffff; --card: #f6f7f9;
  --accent: #1d4ed8; --bad: #c81e1e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ee; --soft: #a3abb9; --line: #363c47; --page: #14171c;
  --card: #1d2128; --accent: #8ab4ff; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 32px 60px; max-width: 1280px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 8px; }
p { margin: 6px 0; } .soft { color: var(--soft); } .bad { color: var(--bad); }
.answer { font-size: 17px; margin: 10px 0 14px; }
.tiles { display: grid; grid-template-columns: repeat(5, 1fr); gap: 12px; margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; } .tile span { color: var(--soft); }
.meter { height: 6px; background: var(--line); border-radius: 3px; margin-top: 6px; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--accent); }
figure { margin: 8px 0 18px; position: relative; } figcaption { color: var(--soft); margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .grid { stroke: var(--line); }
svg .edge { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .budget { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 7 4; } svg .bad { fill: var(--bad); }
svg .on-bar { fill: #fff; pointer-events: none; }
svg .lane { fill: var(--card); } svg .cursor { stroke: var(--ink); stroke-width: 1; visibility: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 18px; font-size: 13px; margin: 4px 0 0 66px; }
.legend i, td i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; } th, td { padding: 4px 10px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; white-space: nowrap; }
ul { margin: 6px 0; } .keys td:first-child { white-space: nowrap; width: 1%; padding-right: 24px; }
.columns { display: grid; grid-template-columns: 1fr 1fr; gap: 0 40px; }
code, pre { font: 13px/1.5 ui-monospace, "Liberation Mono", monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; overflow-x: auto; }
.tip { position: absolute; pointer-events: none; visibility: hidden; background: var(--page); color: var(--ink);
  border: 1px solid var(--soft); border-radius: 6px; padding: 6px 10px; font-size: 12px; white-space: pre; z-index: 2; }
@media screen and (max-width: 800px) { .tiles { grid-template-columns: repeat(2, 1fr); }
  .columns { grid-template-columns: 1fr; }
  body { padding: 16px; } .columns > * { min-width: 0; } table { display: block; overflow-x: auto; }
  figure { overflow-x: auto; } svg { min-width: 760px; } .legend { margin-left: 0; } }
@media print { body { max-width: none; padding: 0; } .columns { grid-template-columns: 1fr; }
  figure, table, .tiles { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

SCRIPT = """
// a chart with data shows what it holds under the pointer
for (const figure of document.querySelectorAll('figure[data-chart]')) {
  const data = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
  const svg = figure.querySelector('svg'), cursor = svg.querySelector('.cursor'), tip = figure.querySelector('.tip');
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), scale = data.width / box.width;
    const x = (event.clientX - box.left) * scale;
    if (x < data.left || x > data.right) return hide();
    const time = (x - data.left) / (data.right - data.left) * data.end;
    let row = 0;
    while (row + 1 < data.times.length && data.times[row + 1] <= time) row += 1;
    const held = data.names.map((name, i) => [name, data.mib[row][i]]).filter(pair => pair[1] >= 1);
    const total = held.reduce((sum, pair) => sum + pair[1], 0);
    const lines = held.reverse().map(pair => pair[0] + '  ' + (pair[1] / 1024).toFixed(2) + ' GiB');
    tip.textContent = 'at ' + time.toPrecision(3) + ' s: ' + (total / 1024).toFixed(2) + ' GiB\\n' + lines.join('\\n');
    cursor.setAttribute('x1', x); cursor.setAttribute('x2', x); cursor.style.visibility = 'visible';
    const at = event.clientX - box.left, right = at > box.width * 0.7;
    tip.style.left = right ? '' : at + 14 + 'px'; tip.style.right = right ? box.width - at + 14 + 'px' : '';
    tip.style.top = '30px'; tip.style.visibility = 'visible';
  });
  const hide = () => { cursor.style.visibility = tip.style.visibility = 'hidden'; };
  svg.addEventListener('mouseleave', hide);
}
"""

COLOURS = {
    "CUDA context": "#6b7280",
    "process": "#6b7280",
    "library workspace": "#8d96a5",
    "CUDA graphs": "#8d96a5",
    "temporaries": "#8d96a5",
    "slack": "#b9c0cb",
    "batch": "#a3a08f",
    "scalars": "#a3a08f",
    "weights": "#2f6fed",
    "resident weights": "#2f6fed",
    "weight slots": "#86b0ff",
    "decoded weights": "#b5d0ff",
    "gradients": "#e8661b",
    "resident gradients": "#e8661b",
    "gradient slots": "#f7a468",
    "gradient accumulators": "#f2c230",
    "optimizer states": "#7c4ddb",
    "resident optimizer states": "#7c4ddb",
    "dealt optimizer states": "#7c4ddb",
    "shards": "#7c4ddb",
    "second planes": "#5b3bb0",
    "optimizer slots": "#b79af0",
    "kept activations": "#1f9d55",
    "offloaded activations": "#1f9d55",
    "offload slots": "#7fd3a0",
    "hidden states": "#0f9aa0",
    "key/value window": "#7fd0d3",
    "scratch": "#cf3d86",
    "other": "#9aa1ad",
}
"""Colours of memory categories: one hue per kind of tensor, lighter for slots that data only pass through."""
OTHER_COLOURS = ("#5b8c2a", "#8c6d2a", "#2a6d8c", "#8c2a5b")
"""Colours for categories that are not listed above."""


def colour(category: str) -> str:
    """Give the colour of a memory category; an unlisted one always gets the same colour, too."""
    # By its letters, as the hash of a text differs from process to process.
    return COLOURS.get(category) or OTHER_COLOURS[sum(category.encode()) % len(OTHER_COLOURS)]
