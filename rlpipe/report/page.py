"""The skeleton of report.html: markup, style and script, with nothing about any metric.

Owns how the page looks and behaves; `report.py` fills it. Everything is inline, plotly and the trajectories
gzipped, and the content policy forbids every request, so the file can be mailed, archived and opened offline.
Colours are the Okabe-Ito set, lightened for dark mode; the theme follows the reader's system.
`LIVE` makes the page ask the server it came from for news (watch.py).
"""

from __future__ import annotations

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; ${policy}style-src 'unsafe-inline'; script-src 'unsafe-inline';
 img-src data: blob:">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
<script type="text/plain" id="plotly">$plotly</script>
<script type="application/json" id="data">$data</script>
<script type="text/plain" id="trajectory-data">$trajectories</script>
<script>$script</script>
</body>
</html>
""")

STYLE = """
:root { --bg:#f7f7f5; --card:#fff; --text:#1c1f23; --dim:#62686f; --line:#e3e3df; --accent:#0072b2;
  --good:#00795a; --warn:#8a6100; --bad:#b5400a; --code:#f1f1ee; }
@media (prefers-color-scheme: dark) { :root { --bg:#121417; --card:#1b1e23; --text:#e6e8eb; --dim:#9aa2ab;
  --line:#2c3138; --accent:#6cb8ec; --good:#3fc79f; --warn:#e3b341; --bad:#f0905a; --code:#23272d; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--text); line-height:1.5;
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 20px 60px; }
h1 { font-size:26px; margin:0 6px 0 0; letter-spacing:-.01em; display:inline; overflow-wrap:anywhere; }
h2 { font-size:19px; margin:38px 0 12px; }
h3 { font-size:15px; margin:0; }
.sub, .note { color:var(--dim); }
.sub { margin:4px 0 22px; overflow-wrap:anywhere; }
.note { font-size:13px; margin:2px 0 6px; }
.badge { display:inline-block; font-size:12.5px; font-weight:600; padding:2px 10px; border-radius:20px;
  border:1px solid currentColor; vertical-align:4px; white-space:nowrap; }
.good { color:var(--good); } .warn { color:var(--warn); } .bad { color:var(--bad); }
.runs table { font-size:13px; }
.runs th, .runs td { padding:8px 9px; min-width:92px; }
.cards { display:grid; grid-template-columns:repeat(auto-fill,minmax(250px,1fr)); gap:12px; }
.card, .plot, details, .notice, .scroll, .viewer { background:var(--card); border:1px solid var(--line);
  border-radius:12px; }
.card { padding:14px 16px; }
.card .label { color:var(--dim); font-size:13px; }
.card .big { font-size:25px; font-weight:650; letter-spacing:-.02em; font-variant-numeric:tabular-nums;
  white-space:nowrap; }
.card .big .from { color:var(--dim); font-weight:450; }
.card .small { color:var(--dim); font-size:13px; }
.notice { padding:14px 18px; margin:14px 0; border-left:4px solid var(--warn); }
.plots { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:14px; }
.plot { padding:14px 16px 6px; min-width:0; }
.plot.wide { grid-column:1/-1; }
details { margin:12px 0; }
summary { cursor:pointer; padding:12px 16px; font-weight:600; }
details > :not(summary) { margin:0 16px 16px; }
pre { background:var(--code); border-radius:8px; padding:12px 14px; overflow:auto; font-size:12.5px;
  line-height:1.45; max-height:480px; white-space:pre-wrap; overflow-wrap:anywhere; }
.scroll { overflow:auto; max-height:520px; }
details .scroll { border-radius:8px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; }
th, td { text-align:left; padding:7px 12px; border-bottom:1px solid var(--line); vertical-align:top; }
th { position:sticky; top:0; background:var(--card); color:var(--dim); font-weight:600; white-space:nowrap; }
tr:last-child td { border-bottom:0; }
td.num, th.num { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
td .small, th .small { color:var(--dim); font-size:12.5px; font-weight:400; }
td .from { color:var(--dim); }
code { font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
.swatch { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:7px; }
.viewer { padding:16px; }
.bar { display:flex; flex-wrap:wrap; gap:8px; align-items:center; margin-bottom:12px; }
.bar .grow { flex:1; }
button, select { font:inherit; font-size:14px; color:inherit; background:var(--code); border-radius:8px;
  border:1px solid var(--line); padding:6px 12px; min-height:36px; max-width:100%; }
button:focus-visible, select:focus-visible, summary:focus-visible { outline:2px solid var(--accent); }
.turn { margin:10px 0; }
.turn .role { font-size:11.5px; font-weight:700; letter-spacing:.06em; text-transform:uppercase;
  color:var(--dim); margin-bottom:3px; }
.turn pre { margin:0; border-left:3px solid var(--line); }
.turn.assistant pre { border-left-color:var(--accent); }
.turn.assistant .role { color:var(--accent); }
.advice { border-left-color:var(--accent); margin:0 0 12px; }
.advice .small { color:var(--dim); font-size:13px; }
.tok { border-radius:2px; cursor:default; }
.tok.on { outline:2px solid var(--text); }
.legend { display:flex; flex-wrap:wrap; gap:4px 14px; font-size:12.5px; color:var(--dim); min-height:0; }
.legend i { display:inline-block; width:14px; height:14px; border-radius:3px; margin-right:5px;
  vertical-align:-2px; }
.about { position:sticky; bottom:0; background:var(--card); border-top:1px solid var(--line); font-size:13px;
  padding:8px 2px 2px; font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
.about:empty { display:none; }
.turn.tool pre { border-left-color:var(--warn); }
.turn.tool .role { color:var(--warn); }
footer { color:var(--dim); font-size:13px; margin-top:36px; }
@media (max-width:760px) { main { padding:18px 12px 40px; } .plots { grid-template-columns:minmax(0,1fr); }
  .cards { grid-template-columns:repeat(2,minmax(0,1fr)); gap:9px; } .card { padding:11px 12px; }
  .card .big { font-size:19px; } h1 { font-size:22px; } .plot { padding:12px 8px 2px; }
  .plot h3, .plot .note { padding:0 4px; } }
"""

SCRIPT = r"""
(() => {
const page = window.report = { data: null, trajectories: [] };
const byId = (id) => document.getElementById(id);
const dark = matchMedia('(prefers-color-scheme: dark)');
const palettes = {
  light: ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#b58900', '#56b4e9', '#8a9099'],
  dark:  ['#56b4e9', '#f0884a', '#2cc79c', '#e59cc6', '#f0c64a', '#a9b8ff', '#858c95'],
};
const palette = () => palettes[dark.matches ? 'dark' : 'light'];
const colour = (n) => palette()[n % palette().length];
const alpha = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, '0');

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
}
function coloured(value, text) {
  if (Array.isArray(value)) return typeof value[0] === 'number' ? value : value.map(v => coloured(v, text));
  if (value && typeof value === 'object')
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, text)]));
  if (value === '$text') return text;
  const m = typeof value === 'string' && value.match(/^[$]([0-9]+)(a?)$/);
  if (!m) return value;
  return m[2] ? alpha(colour(m[1]), 0.33) : colour(m[1]);
}
function draw() {
  const css = getComputedStyle(document.documentElement);
  const [text, dim, line, card] =
    ['--text', '--dim', '--line', '--card'].map(v => css.getPropertyValue(v).trim());
  const phone = innerWidth < 760;
  page.data.figures.forEach((figure, i) => {
    const axis = { gridcolor: line, zeroline: false, linecolor: line, tickcolor: line };
    const more = figure.layout;
    const bars = figure.traces.some(t => t.orientation === 'h');
    const layout = {
      height: 290, hovermode: 'x unified', dragmode: phone ? false : 'zoom',
      showlegend: figure.traces.length > 1, ...more,
      margin: { l: phone ? 56 : 66, r: 14, t: 10, b: 40 },
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      font: { family: 'system-ui, sans-serif', size: phone ? 11 : 12.5, color: dim },
      legend: { orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom', font: { color: text } },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text } },
      xaxis: { title: { text: 'training step' }, ...axis, ...more.xaxis },
      yaxis: { ...axis, ...more.yaxis },
    };
    if (more.yaxis2) layout.yaxis2 = { ...axis, ...more.yaxis2 };
    for (const name of ['xaxis', 'yaxis', 'yaxis2'])
      if (layout[name]?.title)
        layout[name].title = { ...layout[name].title, font: { size: layout.font.size } };
    if (bars) {
      layout.yaxis.gridcolor = 'rgba(0,0,0,0)';
      layout.xaxis = { ...layout.xaxis, zeroline: true, zerolinecolor: dim };
    }
    Plotly.react('plot-' + i, coloured(figure.traces, text), coloured(layout, text), {
      responsive: true, displayModeBar: false,
    });
  });
  for (const swatch of document.querySelectorAll('.swatch'))
    swatch.style.background = colour(swatch.dataset.n);
}

function makeViewer() {
  const [run, step, outcome, mode, prev, next, where, legend, turns, about] =
    ['run', 'step', 'outcome', 'colour', 'prev', 'next', 'where', 'legend', 'turns', 'token']
      .map(id => byId('v-' + id));
  let shown = [], at = 0, marked = null;
  const element = (tag, className, textContent) =>
    Object.assign(document.createElement(tag), { className, textContent });
  const reward = (t) => t.reward === null ? 'none' : String(+t.reward.toFixed(3));
  const accepted = (depth) =>
    depth > 0 ? alpha(colour(0), Math.min(0.75, 0.1 + 0.2 * depth)) : alpha(colour(1), 0.4);
  const warmth = (hundredths) => alpha(colour(3), Math.min(0.85, hundredths / 250));
  const paint = {
    accepted: (turn, i) => turn.a && turn.a[i] >= 0 ? accepted(turn.a[i]) : '',
    entropy: (turn, i) => warmth(turn.e[i]),
    logprob: (turn, i) => warmth(turn.p[i]),
    version: (turn, i) => alpha(colour(version(turn, i) + 6), 0.4),
  };
  const keys = {
    accepted: () => [[accepted(0), 'sampled by the target'], [accepted(1), 'accepted draft, depth 1'],
      [accepted(2), 'depth 2'], [accepted(3), 'depth 3 and deeper']],
    entropy: () => [[warmth(10), '0.1 nat'], [warmth(70), '0.7 nat'], [warmth(200), '2 nat and more']],
    logprob: () => [[warmth(10), '−log p = 0.1 nat'], [warmth(70), '0.7'], [warmth(200), '2 and more']],
    version: () => [...new Set(shown[at].turns.flatMap(t => (t.v ?? []).map(([v]) => v)))]
      .map(v => [alpha(colour(v + 6), 0.4), 'policy version ' + v]),
  };
  function version(turn, i) {
    for (const [v, count] of turn.v) { if (i < count) return v; i -= count; }
    return -1;
  }
  function describe(turn, i) {
    const how = !turn.a || turn.a[i] < 0 ? '' :
      turn.a[i] > 0 ? ` · accepted as draft ${turn.a[i]}` : ' · sampled by the target';
    return `${JSON.stringify(turn.tokens[i])} · probability ${Math.exp(-turn.p[i] / 100).toPrecision(2)}` +
      ` · entropy ${(turn.e[i] / 100).toFixed(2)} nat${how} · version ${version(turn, i)}`;
  }
  function tokens(turn) {
    const pre = document.createElement('pre');
    const fill = paint[mode.value];
    turn.tokens.forEach((text, i) => {
      const token = element('span', 'tok', text);
      if (fill) token.style.background = fill(turn, i);
      token.dataset.i = i;
      pre.append(token);
    });
    pre.onmouseover = pre.onclick = ({ target }) => {
      if (target.dataset.i === undefined) return;
      marked?.classList.remove('on');
      marked = target; marked.classList.add('on');
      about.textContent = describe(turn, +target.dataset.i);
    };
    return pre;
  }
  function choose() {
    shown = page.trajectories.filter(t =>
      (!run || run.value === '' || t.run === run.value) &&
      (step.value === '' || String(t.step) === step.value) &&
      (outcome.value === '' || (outcome.value === 'solved') === (t.reward >= 1)));
    at = 0; show();
  }
  function show() {
    const t = shown[at];
    prev.disabled = at <= 0; next.disabled = at >= shown.length - 1;
    turns.replaceChildren(); legend.replaceChildren(); about.textContent = '';
    if (!t) { where.textContent = 'no such trajectory'; return; }
    where.textContent = [`${at + 1} of ${shown.length}`, t.run, `step ${t.step}`, t.instance_id,
      `reward ${reward(t)}`, t.status, t.exit && `ended: ${t.exit}`].filter(Boolean).join(' · ');
    for (const [fill, words] of mode && keys[mode.value]?.() || []) {
      const item = element('span', '', '');
      const box = element('i', '', '');
      box.style.background = fill;
      item.append(box, words);
      legend.append(item);
    }
    for (const turn of t.turns) {
      const box = element('div', 'turn ' + turn.role, '');
      box.append(element('div', 'role', turn.role),
        turn.tokens ? tokens(turn) : element('pre', '', turn.text === '' ? '(empty)' : turn.text));
      turns.append(box);
    }
  }
  prev.onclick = () => { at -= 1; show(); };
  next.onclick = () => { at += 1; show(); };
  for (const select of [run, step, outcome]) if (select) select.onchange = choose;
  if (mode) { mode.onchange = show; mode.value = mode.options[1].value; }
  dark.addEventListener('change', show);
  choose();
}

page.show = async (packed) => {
  if (byId('viewer')) {
    page.trajectories = packed ? JSON.parse(await unpack(packed)) : page.trajectories;
    makeViewer();
  }
  draw();
};
page.start = async () => {
  page.data = JSON.parse(byId('data').textContent);
  if (byId('plotly').textContent) {
    const script = document.createElement('script');
    script.textContent = await unpack(byId('plotly').textContent);
    document.head.append(script);
  }
  await page.show(byId('trajectory-data').textContent);
  dark.addEventListener('change', draw);
  document.body.dataset.ready = 'yes';
};
page.start();
})();
"""

LIVE = """
(() => {
let stamp = null;
async function look() {
  try {
    const now = await (await fetch('stamp')).text();
    if (stamp !== null && now !== stamp) {
      const news = await (await fetch('news')).json();
      const open = [...document.querySelectorAll('details')].map(d => d.open);
      const from = scrollY;
      document.querySelector('main').innerHTML = news.body;
      document.querySelectorAll('details').forEach((d, i) => { d.open = open[i] ?? d.open; });
      report.data = news.data;
      await report.show(news.trajectories);
      scrollTo(0, from);
    }
    stamp = now;
    document.title = document.title.replace(/^◌ /, '');
  } catch { document.title = '◌ ' + document.title.replace(/^◌ /, ''); }
  setTimeout(look, 2000);
}
look();
})();
"""
