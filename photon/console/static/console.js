// The console's pages: each is drawn from the JSON that its own address gives. Nothing of it becomes HTML: texts
// of logs are anybody's.
"use strict";

const page = document.getElementById("page");
const link = document.getElementById("link");
const token = document.querySelector('meta[name="photon-token"]').content;
const query = new URLSearchParams(location.search);
const COLOURS = ["#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a"];
const POINTS_MAX = 600;

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const number = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en"));
const when = (us) => new Date(us / 1000).toISOString().replace("T", " ").replace("Z", " UTC");

function table(heads, rows, empty = "none") {
  if (!rows.length) return el("p", { class: "faint" }, empty);
  const numeric = (cell) => typeof cell === "number";
  const columns = heads.map((_, at) => rows.every((row) => numeric(row[at])));
  const long = (value) => typeof value === "string" && value.length > 40;
  const cell = (value, at) => el("td", { class: columns[at] ? "number" : long(value) ? "long" : null }, numeric(value) ? number(value) : value ?? "");
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.filter(Boolean).join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head, at) => el("th", { scope: "col", class: columns[at] ? "number" : null }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), ...children);

function slot(name) {
  // A part of the page that is drawn again and again; what stands around it keeps its focus.
  let found = document.getElementById(`slot-${name}`);
  if (!found) page.append((found = el("div", { id: `slot-${name}` })));
  return found;
}

function draw(name, ...children) {
  const place = slot(name);
  const had = place.contains(document.activeElement) ? document.activeElement.getAttribute("data-key") : null;
  place.replaceChildren(...children.filter(Boolean));
  if (had) place.querySelector(`[data-key="${CSS.escape(had)}"]`)?.focus();
}

const failed = (told) => {
  if (!told || !told.error) return false;
  draw("error", el("p", { class: "verdict", role: "alert" }, told.error));
  return true;
};

function stream(show) {
  const source = new EventSource(location.pathname + location.search);
  source.onmessage = (event) => {
    link.textContent = "";
    const told = JSON.parse(event.data);
    if (failed(told)) return;
    draw("error");
    show(told);
  };
  source.onerror = () => { link.textContent = "not connected; trying again"; };
}

async function once(show) {
  const answer = await fetch(location.pathname + location.search, { headers: { Accept: "application/json" } });
  const told = await answer.json();
  if (!failed(told)) show(told);
}

async function act(name, asked) {
  const answer = await fetch(`/actions/${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Photon-Token": token },
    body: JSON.stringify(asked),
  });
  return answer.json();
}

// -- now -----------------------------------------------------------------------------------------------------------

const history = { times: [], datacenters: {} };
const plots = {};

function remember(news) {
  const before = history.times.length;
  history.times.push(...news.times);
  history.edges = news.edges_ms;
  for (const [name, columns] of Object.entries(news.datacenters)) {
    const own = (history.datacenters[name] ??= {});
    for (const [key, values] of Object.entries(columns)) {
      own[key] ??= Array(before).fill(null);
      own[key].push(...values);
    }
  }
  const over = history.times.length - POINTS_MAX;
  if (over > 0) {
    history.times.splice(0, over);
    for (const own of Object.values(history.datacenters)) for (const values of Object.values(own)) values.splice(0, over);
  }
}

function plot(title, key) {
  const names = Object.keys(history.datacenters);
  const place = slot("charts");
  const id = `${key}-${names.join(",")}`;
  const data = [history.times, ...names.map((name) => history.datacenters[name][key])];
  if (plots[key]?.id === id) {
    plots[key].chart.setData(data);
    return;
  }
  plots[key]?.box.remove();
  const box = card(title);
  const holder = el("div", { role: "img", "aria-label": title });
  box.append(holder);
  if (!place.classList.contains("grid")) place.classList.add("grid");
  place.append(box);
  const ink = getComputedStyle(document.body).color;
  const axis = { stroke: ink, grid: { stroke: "rgba(128,128,128,.25)" }, ticks: { stroke: "rgba(128,128,128,.25)" } };
  const series = names.map((name, at) => ({ label: name, stroke: COLOURS[at % COLOURS.length], width: 2 }));
  const size = () => ({ width: Math.max(220, holder.clientWidth), height: 180 });
  const chart = new uPlot({ ...size(), series: [{}, ...series], axes: [axis, { ...axis, size: 60 }], cursor: { drag: { x: false } } }, data, holder);
  new ResizeObserver(() => chart.setSize(size())).observe(holder);
  plots[key] = { id, chart, box };
}

function heat() {
  // Latency over time: a column a step, a row a bucket, as dark as the share of the step's events in it.
  const place = slot("heat");
  if (!place.firstChild) {
    place.append(card("Latency: from the line read to the joined line",
      el("canvas", { class: "heat", role: "img", "aria-label": "Latency over time" }), el("p", { id: "latency", class: "faint" })));
  }
  const canvas = place.querySelector("canvas");
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const edges = history.edges;
  const steps = history.times.map((_, at) => {
    const sum = edges.map(() => 0);
    for (const own of Object.values(history.datacenters)) (own.latencies[at] || []).forEach((count, row) => { sum[row] += count; });
    return sum;
  });
  let top = 14;
  for (const counts of steps) counts.forEach((count, row) => { if (count) top = Math.max(top, row + 1); });
  const [left, across, high] = [52, Math.max(60, history.times.length), height / Math.min(edges.length, top)];
  const wide = (width - left) / across;
  steps.forEach((counts, at) => {
    const all = counts.reduce((a, b) => a + b, 0);
    counts.forEach((count, row) => {
      if (!count) return;
      pen.fillStyle = `rgba(217, 95, 2, ${0.12 + 0.88 * Math.sqrt(count / all)})`;
      pen.fillRect(left + at * wide, height - (row + 1) * high, Math.ceil(wide), Math.max(1, high - 0.5));
    });
  });
  pen.fillStyle = getComputedStyle(document.body).color;
  pen.font = "11px system-ui";
  const shown = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
  for (let row = 0; row < top; row += 4) pen.fillText(shown(edges[row]), 0, height - row * high - 2);
  const last = edges.map((_, row) => steps.slice(-30).reduce((sum, counts) => sum + counts[row], 0));
  const all = last.reduce((a, b) => a + b, 0);
  const below = (share) => { let seen = 0; return edges[last.findIndex((count) => (seen += count) >= share * all)]; };
  document.getElementById("latency").textContent = all
    ? `of the last minute: half below ${shown(below(0.5))}, 99 % below ${shown(below(0.99))}` : "nothing was joined in the last minute";
}

async function doing(what, asked) {
  const said = await act(what, asked);
  draw("said", el("p", { role: "status" }, said.error || said.told));
}

function outages(told) {
  // Of datacenters.
  const button = (name, what, label, danger) => el("button", {
    type: "button", class: danger ? "danger" : null, "data-key": `act-${danger || what === "restore" ? "" : what}${name}`,
    onclick: () => doing(what, { datacenter: name }) }, `${label} ${name}`);
  const made = Object.entries(told.datacenters).flatMap(([name, state]) => (state === "up"
    ? [button(name, "kill", "Kill", true), button(name, "freeze", "Freeze"), button(name, "fill", "Fill the disk of")]
    : [button(name, "restore", "Restore")]));
  return el("form", { onsubmit: (event) => event.preventDefault(), "aria-label": "Outages" }, made);
}

function links(told) {
  // Drawn once, as it has fields; what is out of order is drawn again and again.
  const place = slot("links");
  if (!place.firstChild) {
    const names = told.links.map((one) => one.between.join(" and "));
    const link = el("select", {}, names.map((name, at) => el("option", { value: at }, name)));
    const ms = el("input", { type: "number", min: 1, max: 10000, value: 300, size: 6 });
    const button = (what, label) => el("button", { type: "button", onclick: () => doing(what, {
      between: told.links[link.value].between, ms: Number(ms.value) }) }, label);
    place.append(el("form", { onsubmit: (event) => event.preventDefault(), "aria-label": "Links" },
      el("label", {}, "Link between", link), button("cut", "Cut"), button("delay", "Slow down"),
      el("label", {}, "by ms a round trip", ms), button("mend", "Mend")));
  }
  const not = told.links.filter((one) => one.state).map((one) => `${one.between.join(" and ")}: ${one.state}`);
  draw("links-out", not.length ? el("p", { class: "bad" }, `Links: ${not.join("; ")}`) : null);
}

function now() {
  page.append(el("h1", {}, "Now"));
  for (const name of ["verdict", "acts", "links", "links-out", "said", "checks", "charts", "heat", "fates", "processes"]) slot(name);
  stream((told) => {
    remember(told.history);
    draw("verdict", el("p", { class: `verdict ${told.well ? "well" : ""}`, role: "status" }, told.verdict));
    if (told.acts.includes("kill")) draw("acts", outages(told));
    if (told.acts.includes("cut") && told.links.length) links(told);
    draw("checks", ...told.checks.map((one) => el("p", { class: one.ok ? "good" : one.ok === false ? "bad" : "faint" },
      `${one.ok ? "ok" : one.ok === false ? "WRONG" : "?"}: ${one.text}`)));
    plot("Joined a second", "joined_per_s");
    plot("Events that wait", "waiting");
    plot("Seconds behind the logs", "behind_s");
    plot("Joins in vain", "wasted");
    heat();
    const rows = Object.entries(told.fates).map(([name, row]) => [
      name, row.foreign_events,
      Object.entries(row.fates).filter(([, count]) => count).map(([fate, count]) => `${fate} ${number(count)}`).join(" + "),
      row.adds_up ? el("span", { class: "good" }, "adds up") : el("span", { class: "bad" }, "DOES NOT ADD UP"),
    ]);
    draw("fates", card("What became of every event", table(["datacenter", "events read", "fates", ""], rows)));
    draw("processes", card("Processes", table(["process", "says"], Object.entries(told.processes))));
  });
}

// -- one event -----------------------------------------------------------------------------------------------------

const field = (name, label, value, more = {}) => el("label", {}, label, el("input", { name, value, autocomplete: "off", ...more }));

function pretty(line) {
  try { return el("pre", {}, JSON.stringify(JSON.parse(line), null, 1)); } catch { return el("pre", {}, line ?? ""); }
}

function event() {
  page.append(el("h1", {}, "Event"), el("form", { role: "search" },
    field("id", "Id of a foreign event", query.get("id") || "", { autofocus: "", size: 30 }),
    field("primary_id", "of its primary, if no log has it yet", query.get("primary_id") || ""),
    el("button", {}, "Explain")));
  once((told) => {
    if (!told.id) {
      if (told.index) draw("index", el("p", { class: "faint" }, `${number(told.index.events)} joined events are known here`));
      return;
    }
    const found = told.joined.length || told.dead_letters.length;
    draw("fate", el("p", { class: `verdict ${told.joined.length ? "well" : ""}`, role: "status" }, `${told.id}: ${told.fate} `,
      el("span", { class: "faint" }, `(asked for ${Math.round(told.seconds * 1000)} ms)`)));
    const primary = Object.entries(told.primary?.datacenters || {});
    const line = primary.map(([, one]) => one.line).find(Boolean);
    const own = told.joined[0]?.line || told.dead_letters[0]?.event || Object.values(told.pending).map((one) => one?.line).find(Boolean);
    draw("pair", el("div", { class: "grid" },
      card(told.joined.length ? "The joined line" : "The foreign event", own ? pretty(own) : el("p", { class: "faint" }, "no log here has it"),
        ...told.joined.map((one) => el("p", { class: "faint" }, `${one.datacenter}: ${one.file}, ${one.row === undefined ? `byte ${number(one.offset)}` : `row ${number(one.row)}`}`))),
      card("Its primary event", line ? pretty(line) : el("p", { class: "faint" }, told.primary ? "is not there" : "not known which"),
        table(["datacenter", "event store says"], primary.map(([name, one]) => [name, one.silent || one.outcome])))));
    draw("letters", found && !told.dead_letters.length ? null : card("Dead letters",
      table(["datacenter", "fate", "why", "log"], told.dead_letters.map((one) => [one.datacenter, one.fate, one.reason, `${one.file}:${one.offset}`]))));
    draw("timeline", card("What happened, in every datacenter", table(["time", "datacenter", "what"],
      told.timeline.map((row) => [when(row.time_us), row.datacenter, row.what]), "nothing is known of it")));
    const waits = Object.entries(told.pending).filter(([, one]) => one).map(([name, one]) =>
      one.silent ? [name, one.silent, "", ""] : [name, `since ${when(one.waiting_since_us)}`, `${one.tries} tries`, `next ${when(one.due_us)}`]);
    if (waits.length) draw("waits", card("Waits", table(["datacenter", "", "", ""], waits)));
    const not = [...told.not_here, ...Object.entries(told.unreadable).map(([path, why]) => `${path}: ${why}`)];
    if (not.length) draw("not", card("Not looked at", table([""], not.map((path) => [path]))));
  });
}

// -- what waits ----------------------------------------------------------------------------------------------------

function waiting() {
  page.append(el("h1", {}, "Waiting"));
  stream((told) => {
    for (const [name, one] of Object.entries(told.datacenters)) {
      const some = (rows, label) => rows.filter((row) => row.count).map((row) => [row.below ? `${label} ${number(row.below)}` : "more", row.count]);
      const ages = some(one.ages, "seconds: fewer than");
      const tries = some(one.tries, "fewer than");
      const logs = [
        ...Object.entries(one.unended).map(([file, why]) => [file, why]),
        ...Object.entries(one.primary_logs).flatMap(([store, row]) => [
          [store, row.caught_up ? "has read all primary logs" : "is behind: it reads primary logs"],
          ...Object.entries({ ...row.unended, ...row.unreadable }).map(([file, why]) => [file, why])]),
        ...one.paused.map((why) => ["reading pauses", why]),
        ...one.silent.map((why) => ["no answer", why])];
      draw(`dc-${name}`, el("h2", {}, `${name}: ${number(one.waiting)} events wait, ${number(one.bytes)} bytes`),
        el("div", { class: "grid" }, card("Of those that are tried next: waiting for", table(["", "events"], ages)),
          card("tried", table(["", "events"], tries)), card("Logs", table(["", ""], logs))),
        card("Tried next", table(["event", "since", "tries", "next", "log"], one.next.slice(0, 50).map((row) => [
          el("code", {}, row.line.slice(0, 200)), when(row.waiting_since_us), row.tries, when(row.due_us), `${row.file}:${row.offset}`]))));
    }
  });
}

// -- dead letters --------------------------------------------------------------------------------------------------

function deadLetters() {
  page.append(el("h1", {}, "Dead letters"));
  const choice = (name, label, values) => el("label", {}, label, el("select", { name },
    el("option", { value: "" }, "all"), values.map((value) => el("option", { value, selected: value === query.get(name) ? "" : null }, value))));
  once((told) => {
    draw("form", el("form", { role: "search" }, choice("datacenter", "Datacenter", told.datacenters), choice("fate", "Fate", told.fates),
      field("reason", "Reason has", query.get("reason") || ""), el("button", {}, "Show")));
    const to = (changes) => `?${new URLSearchParams({ ...Object.fromEntries(query), ...changes })}`;
    const kinds = Object.entries(told.kinds).flatMap(([name, rows]) => rows.map((row) => [
      name, row.log, row.fate, el("a", { href: to({ datacenter: name, fate: row.fate, skip: 0 }) }, row.reason), row.count, row.replayed]));
    draw("kinds", card("By reason", table(["datacenter", "log", "fate", "why", "letters", "replayed"], kinds, "no dead letters")));
    if (told.acts.includes("replay") && told.datacenters.length) draw("replay", replayForm(told));
    draw("letters", card("Letters", table(["datacenter", "fate", "why", "log", "event"], told.letters.map((one) => [
      one.datacenter, one.fate, one.reason, `${one.file}:${one.offset}`, el("code", {}, one.event.slice(0, 400))])),
    el("p", {}, told.skip ? el("a", { href: to({ skip: Math.max(0, told.skip - 50) }) }, "newer page ") : "",
      told.more ? el("a", { href: to({ skip: told.skip + 50 }) }, "next page") : "")));
  });
}

function replayForm(told) {
  const form = el("form", { "aria-label": "Replay", onsubmit: (event) => event.preventDefault() });
  const names = told.datacenters.filter((name) => !query.get("datacenter") || name === query.get("datacenter"));
  const rate = el("input", { type: "number", min: 1, size: 8, placeholder: "all at once" });
  const doit = (dry) => async () => {
    const said = [];
    const pace = rate.value ? { rate: Number(rate.value) } : {};
    for (const datacenter of names) {
      const done = await act("replay", { datacenter, fate: query.get("fate") || "", reason: query.get("reason") || "", dry_run: dry, ...pace });
      const at = done.rate ? `, ${number(done.rate)} a second` : "";
      said.push(`${datacenter}: ${done.error || (dry ? `${number(done.would_replay)} would be tried again` : `${number(done.replayed)} are tried again${at}`)}`);
    }
    draw("replayed", el("p", { role: "status" }, said.join("; ")));
  };
  form.append(el("button", { type: "button", onclick: doit(true) }, "How many would be replayed"),
    el("label", {}, "events a second", rate), el("button", { type: "button", class: "danger", onclick: doit(false) }, "Replay what is shown"));
  return form;
}

// -- registry, members, millwheel ----------------------------------------------------------------------------------

function registry() {
  page.append(el("h1", {}, "Registry"));
  stream((told) => {
    draw("quorum", el("p", { class: `verdict ${told.quorum ? "well" : ""}`, role: "status" },
      told.quorum ? "every shard and the directory have a quorum" : "NO QUORUM: nothing is registered"));
    const replicas = Object.entries(told.replicas).map(([name, one]) => (one
      ? [name, one.directory.is_leader ? "leads the directory" : "", one.shards.filter((s) => s.is_leader).map((s) => s.shard).join(" ") || "no shard", one.queue]
      : [name, "does not answer", "", 0]));
    draw("replicas", card("Replicas", table(["replica", "", "leads shards", "queue"], replicas)));
    const known = Object.values(told.replicas).filter(Boolean);
    if (!known.length) return;
    const best = known.find((one) => one.directory.is_leader) || known[0];
    const shards = new Map();
    for (const one of known) for (const shard of one.shards) if (!shards.has(shard.shard) || shard.is_leader) shards.set(shard.shard, shard);
    draw("shards", card("Shards", table(["shard", "leader", "quorum", "ids", "of these in files", "bytes of files", "commits", "forgets events before"],
      [...shards.values()].sort((a, b) => a.shard - b.shard).map((one) => [
        one.shard, one.leader, one.has_quorum ? "yes" : "NO", one.ids, one.segments, one.file_bytes, one.commits, one.boundary_us > 0 ? when(one.boundary_us) : "none"]))));
    const d = best.directory;
    draw("directory", card("Directory", table(["", ""], [
      ["version of the configuration", number(best.version)], ["protocol", number(best.protocol)], ["leases", number(d.leases)], ["fences", number(d.fences)],
      ["resharding", d.resharding ? `to ${d.resharding[1]}` : "none under way"], ["replacing", d.replacing ? `${d.replacing[0]} by ${d.replacing[1]}` : "nobody"],
      ...Object.entries(best.sets).map(([name, set]) => [`set ${name}`, `shards ${set.shards.join(" ") || "none"}${set.retiring ? ", RETIRING" : ""}`]),
      ...Object.entries(d.holding).map(([name, seconds]) => [`held back by ${name}`, `${number(Math.round(seconds))} s`])])));
    const gone = known.flatMap((one) => one.gone_joiners || []);
    if (gone.length) draw("gone", card("Joiners that are gone", table(["joiner", "events"], gone.map((one) => [one.address, one.events]))));
  });
}

function members() {
  page.append(el("h1", {}, "Members and shares"));
  stream((told) => {
    const groups = Object.entries(told.groups).flatMap(([group, one]) => [
      ...Object.entries(one.members).map(([name, shares]) => [group, name, shares.join(" ") || "none", one.leaving.includes(name) ? "leaves" : ""]),
      ...one.unowned.map((share) => [group, "NOBODY", String(share), ""]),
      ...Object.entries(one.moving).map(([share, heir]) => [group, `moves to ${heir}`, share, ""])]);
    draw("groups", card("Shares of the logs", table(["group", "member", "shares", ""], groups, "one dispatcher machine a datacenter: no shares move")));
    draw("processes", card("Processes", table(["process", "says"], Object.entries(told.processes).map(([name, one]) => [
      name, one ? one.line : el("span", { class: "bad" }, "does not answer")]))));
  });
}

function held(one) {
  const { name, worker, low_watermark_us, held_by, ...rest } = one;
  return [held_by, ...Object.entries(rest).map(([key, value]) => `${key} ${JSON.stringify(value)}`)].join(", ");
}

const svg = (tag, attributes, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

const lagClass = (mark) => (!mark || mark.low_watermark_us === null ? "none" : mark.lag_s > 60 ? "bad" : mark.lag_s > 10 ? "slow" : "good");
const lagText = (mark) => (!mark ? "" : mark.low_watermark_us === null ? mark.state : `${number(Math.round(mark.lag_s * 10) / 10)} s behind`);

function graph(s, rates) {
  // Columns by the longest way from an injector; a box for each, coloured by how far behind its low watermark is.
  const nodes = Object.entries(s.graph);
  const depths = {};
  const depth = (name) => (depths[name] ??= 1 + Math.max(-1, ...s.graph[name].reads.map(depth)));
  const columns = [];
  for (const [name] of nodes) (columns[depth(name)] ??= []).push(name);
  const [wide, high, gapX, gapY] = [180, 58, 60, 18];
  const at = {};
  columns.forEach((names, x) => names.forEach((name, y) => { at[name] = [10 + x * (wide + gapX), 10 + y * (high + gapY)]; }));
  const width = 20 + columns.length * (wide + gapX) - gapX;
  const height = 20 + Math.max(...columns.map((names) => names.length)) * (high + gapY) - gapY;
  const edges = nodes.flatMap(([name, one]) => one.reads.map((from) => {
    const [x1, y1, x2, y2] = [at[from][0] + wide, at[from][1] + high / 2, at[name][0], at[name][1] + high / 2];
    return svg("path", { class: "edge", d: `M${x1},${y1} C${x1 + gapX / 2},${y1} ${x2 - gapX / 2},${y2} ${x2},${y2}` });
  }));
  const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);
  const boxes = nodes.map(([name, one]) => {
    const [x, y] = at[name];
    const mark = s.low_watermarks[name];
    const rate = one.kind === "sink" ? "" : rates[name] === undefined ? "" : `${number(rates[name])}/s`;
    const lines = [[short(name, 22), 18, "name"], [lagText(mark), 35, "faint"], [rate, 50, "faint"]];
    const box = svg("g", { class: `box ${one.kind} ${lagClass(mark)}` },
      svg("title", {}, document.createTextNode(`${one.kind} ${name}`)),
      svg("rect", { x, y, width: wide, height: high, rx: 4 }),
      ...lines.map(([text, dy, kind]) => svg("text", { x: x + 10, y: y + dy, class: kind }, document.createTextNode(text))));
    return one.kind === "sink" ? box : svg("a", { href: `?name=${encodeURIComponent(name)}`, "data-key": name, "aria-label": `what holds ${name}` }, box);
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "graph" },
    svg("svg", { class: "graph", width, height, viewBox: `0 0 ${width} ${height}`, role: "group" }, ...edges, ...boxes));
}

function millwheel() {
  page.append(el("h1", {}, "MillWheel"));
  let before = null;
  let rates = {};
  const say = (text) => draw("told", el("p", { role: "status" }, text));
  stream((told) => {
    if (!told.status) {
      draw("none", el("p", { class: "faint" }, "No run of MillWheel was named: photon console --millwheel WORK."));
      return;
    }
    const s = told.status;
    if (before && s.seconds > before.seconds) {
      const took = s.seconds - before.seconds;
      const more = (name) => (s.counts[name]?.records || 0) - (before.counts[name]?.records || 0);
      rates = Object.fromEntries(Object.keys(s.low_watermarks).map((name) => [name, Math.max(0, Math.round(more(name) / took))]));
    }
    before = s;
    draw("head", el("p", {}, `${s.topology.split(" ")[0]}, ${s.workers} workers, ${s.restarts} restarts`));
    draw("graph", card("Graph", graph(s, rates)));
    const behind = (mark) => ({ bad: "bad", good: "good" })[lagClass(mark)] || "";
    draw("stages", card("Computations", table(["", "low watermark", "behind now", "records", "produced", "late", "dead letters"],
      Object.entries(s.low_watermarks).map(([name, mark]) => {
        const counts = s.counts[name] || {};
        return [el("a", { href: `?name=${encodeURIComponent(name)}` }, name),
          mark.low_watermark_us === null ? mark.state : when(mark.low_watermark_us),
          mark.low_watermark_us === null ? "" : el("span", { class: behind(mark) }, `${number(Math.round(mark.lag_s * 10) / 10)} s`),
          counts.records || 0, counts.produced || 0, counts.late || 0, counts.dead_letters || 0];
      }))));
    if (told.why) draw("why", card(`What holds ${query.get("name")}`, told.why.error ? el("p", {}, told.why.error) : table(["computation", "worker", "low watermark", "held by"],
      told.why.chain.map((one) => [one.name, String(one.worker ?? ""), one.low_watermark_us === null ? "none" : when(one.low_watermark_us), el("code", {}, held(one))]))));
    const kill = (worker) => el("button", { class: "danger", "data-key": `kill-${worker}`, onclick: async () => {
      const done = await act("kill-worker", { worker });
      say(done.told || done.error);
    } }, `Kill worker ${worker}`);
    draw("workers", card("Workers", table(["worker", "process", "sequencer", "bytes not acknowledged", ""],
      Object.entries(s.processes).map(([worker, one]) => [worker, String(one.pid ?? "starting"), one.sequencer ?? "", one.unacked_bytes ?? "", told.acts.includes("kill-worker") ? kill(worker) : ""]))));
  });
}

const pages = { "/": now, "/event": event, "/waiting": waiting, "/dead-letters": deadLetters, "/registry": registry, "/members": members, "/millwheel": millwheel };
for (const one of document.querySelectorAll("nav a")) if (one.getAttribute("href") === location.pathname) one.setAttribute("aria-current", "page");
document.title = `${document.querySelector("nav a[aria-current]")?.textContent || "Photon"} - Photon`;
pages[location.pathname]?.();
