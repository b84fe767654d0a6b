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
  return m[2] ? alpha(colour(m[1]), 0.6) : colour(m[1]);
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
      yaxis: { ...axis, automargin: true, ...more.yaxis },
    };
    if (more.yaxis2) layout.yaxis2 = { ...axis, automargin: true, ...more.yaxis2 };
    for (const name of ['xaxis', 'yaxis', 'yaxis2'])
      if (layout[name]?.title) {
        layout[name].title = { ...layout[name].title, font: { size: layout.font.size } };
        if (name !== 'xaxis') layout[name].title.standoff = 8; // from the longest label, not across it
      }
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
  const number = (value) => String(+value.toFixed(3));
  const reward = (t) => t.reward === null ? 'none' : number(t.reward);
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
  function siblings(t) {
    const others = (t.siblings || page.trajectories.filter(o => o !== t && t.group && o.group === t.group &&
      o.run === t.run && o.step === t.step).map(o => o.reward)).filter(other => other !== null);
    if (!others.length || t.reward === null) return '';
    const mean = others.reduce((sum, other) => sum + other, t.reward) / (others.length + 1);
    const above = t.reward - mean;
    return `siblings ${others.map(number).join(', ')}` +
      ` · advantage ${above < 0 ? '−' : '+'}${Math.abs(above).toFixed(2)} (reward minus the group’s mean)`;
  }
  function show() {
    const t = shown[at];
    prev.disabled = at <= 0; next.disabled = at >= shown.length - 1;
    turns.replaceChildren(); legend.replaceChildren(); about.textContent = '';
    if (!t) { where.textContent = 'no such trajectory'; return; }
    where.textContent = [`${at + 1} of ${shown.length}`, t.run, `step ${t.step}`, t.instance_id,
      `reward ${reward(t)}`, siblings(t), t.status, t.exit && `ended: ${t.exit}`,
      t.tamper && `touches: ${t.tamper}`].filter(Boolean).join(' · ');
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
