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
