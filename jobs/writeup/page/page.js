// Unpacks the data of the page, draws figures when they come into view, and shows records.
const $ = (selector, node = document) => node.querySelector(selector);
const all = (selector, node = document) => [...node.querySelectorAll(selector)];

async function unpack(name) {
  const bytes = Uint8Array.from(atob($(`#packed-${name}`).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
const once = (work) => { let result; return () => (result ??= work()); };
const asUrl = (text) => URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
const data = once(async () => JSON.parse(await unpack("data")));
const plotly = once(async () => {
  const script = document.createElement("script");
  script.src = asUrl(await unpack("plotly"));
  await new Promise((done, failed) => {
    script.onload = done;
    script.onerror = failed;
    document.head.append(script);
  });
  return window.Plotly;
});
const tables = once(async () => import(asUrl(await unpack("tables"))));

const cells = JSON.parse(await unpack("cells"));
for (const table of all("table.data")) table.innerHTML = cells[Number(table.dataset.t)];

// ---- theme ------------------------------------------------------------------------------------
const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function setTheme(isDark) {
  root.dataset.theme = isDark ? "dark" : "light";
  root.classList.toggle("dark", isDark); // read by DataTables
  $("#theme").setAttribute("aria-pressed", String(isDark));
  for (const figure of all("figure.drawn")) {
    if (figure.offsetParent) draw(figure);
    else { // it has no width: it is drawn when it comes into view
      figure.classList.remove("drawn");
      nearFigure.observe(figure);
    }
  }
}
$("#theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
dark.addEventListener("change", (event) => setTheme(event.matches));
setTheme(dark.matches);

// ---- sidebar, search and filter -----------------------------------------------------------------
$("#menu").addEventListener("click", () => {
  const open = $("#sidebar").classList.toggle("open");
  $("#menu").setAttribute("aria-expanded", String(open));
});
$("#sidebar").addEventListener("click", (event) => {
  if (event.target.closest("a")) {
    $("#sidebar").classList.remove("open");
    $("#menu").setAttribute("aria-expanded", "false");
  }
});
// A part is shown if it has the chosen state and no other part contains more words of the search. The
// texts are read once, because DataTables removes the rows that it does not show.
const searched = (text) => text.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1"); // 16384 finds 16,384
const texts = new Map(all("article.part").map((part) => [part, new Map()])); // by kind of GPU
for (const [part, ofPart] of texts) {
  for (const each of all(".dot.by-device", $("#sidebar li"))) {
    const copy = part.cloneNode(true);
    const others = all(".by-device", copy).filter((node) => !["", each.dataset.device].includes(node.dataset.device));
    for (const node of others) node.remove();
    ofPart.set(each.dataset.device, searched(copy.textContent));
  }
}
const chosen = { words: [], state: "", device: $(".dot:not([hidden])").dataset.device };
const stateOf = (part) => part.dataset.states.split(";").find((each) => each.startsWith(`${chosen.device}=`))?.split("=").at(-1);
function select() {
  const { words, state } = chosen;
  const count = new Map(); // of the words in each part, or in the names of its problem
  for (const problem of all("section.problem")) {
    const names = `${problem.id} ${$("h2", problem).textContent} ${$(".names", problem).textContent}`.toLowerCase();
    for (const part of all("article.part", problem)) {
      const isChosen = state === "" || stateOf(part) === state;
      const found = words.filter((word) => names.includes(word) || texts.get(part).get(chosen.device).includes(word));
      count.set(part, isChosen ? found.length : -1);
    }
  }
  const most = Math.max(words.length ? 1 : 0, ...count.values());
  let parts = 0;
  for (const problem of all("section.problem")) {
    const found = all("article.part", problem).filter((part) => {
      part.hidden = count.get(part) < most;
      return !part.hidden;
    });
    parts += found.length;
    problem.hidden = found.length === 0;
    $(`#sidebar a[href="#${problem.id}"]`).parentElement.hidden = problem.hidden;
  }
  const isFiltered = words.length > 0 || state !== "";
  for (const node of all("#summary > :not(h2, #counts, #devices)")) node.hidden = isFiltered;
  for (const button of all("#counts button")) button.setAttribute("aria-pressed", String(button.dataset.state === state));
  highlight(words);
  const where = hits.length ? " The key Enter goes to the next place." : "";
  const which = parts && most < words.length ? ` with ${most} of the ${words.length} words` : "";
  $("#found").textContent = `${parts || "No"} part${parts === 1 ? "" : "s"} found${which}.${where}`;
  $("#found").hidden = !isFiltered;
}
let hits = []; // places of the words of the search, as ranges
let hit = -1; // the one that Enter has shown last
function highlight(words) {
  hits = [];
  hit = -1;
  const shown = all("section.problem:not([hidden]) :is(h2, .names, article:not([hidden]))");
  for (const node of words.length ? shown : []) {
    const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      if (walker.currentNode.parentElement.closest("[hidden]")) continue;
      const text = walker.currentNode.data.toLowerCase();
      for (const word of words) {
        for (let i = text.indexOf(word); i >= 0; i = text.indexOf(word, i + word.length)) {
          const range = new Range();
          range.setStart(walker.currentNode, i);
          range.setEnd(walker.currentNode, Math.min(i + word.length, walker.currentNode.length));
          hits.push(range);
        }
      }
    }
  }
  mark("found", hits);
  mark("here", []);
}
function mark(name, ranges) {
  if (!CSS.highlights) return; // an older browser
  const marks = new Highlight();
  for (const range of ranges) marks.add(range);
  CSS.highlights.set(name, marks);
}
$("#search").addEventListener("input", (event) => {
  chosen.words = searched(event.target.value).split(/\s+/).filter(Boolean);
  select();
});
$("#search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || hits.length === 0) return;
  hit = (hit + 1) % hits.length;
  const place = hits[hit].startContainer.parentElement;
  for (let node = place; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  place.scrollIntoView({ block: "center" });
  mark("here", [hits[hit]]);
});
$("#counts").addEventListener("click", (event) => {
  const state = event.target.closest("button")?.dataset.state;
  if (!state) return;
  chosen.state = chosen.state === state ? "" : state;
  select();
});
const current = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    for (const link of all("#sidebar a[aria-current]")) link.removeAttribute("aria-current");
    const link = $(`#sidebar a[href="#${target.id}"]`);
    link?.setAttribute("aria-current", "true");
    link?.scrollIntoView({ block: "nearest" });
  }
}, { rootMargin: "-9% 0px -86% 0px" });
for (const problem of all("section.problem")) current.observe(problem);

// ---- kind of GPU ------------------------------------------------------------------------------
$("#devices")?.addEventListener("click", (event) => {
  const device = event.target.closest("button")?.dataset.device;
  if (device === undefined) return;
  for (const button of all("#devices button")) button.setAttribute("aria-pressed", String(button.dataset.device === device));
  for (const view of all(".by-device")) view.hidden = !["", device].includes(view.dataset.device);
  Object.assign(chosen, { device, state: "" });
  select();
});

// ---- tables -----------------------------------------------------------------------------------
async function enhance(table) {
  if (table.dataset.done) return;
  table.dataset.done = "1";
  const rows = Number(table.dataset.rows);
  const { default: DataTable } = await tables();
  const enhanced = new DataTable(table, {
    order: [], autoWidth: false, info: rows > 25, paging: rows > 25, pageLength: 25,
    searching: rows > 8, layout: { topStart: rows > 25 ? "pageLength" : null },
  });
  if (rows > 25) paged.push(enhanced);
}
const paged = []; // tables that show a part of their rows; paper shows all
let unfolded = []; // answers that are open on paper only
window.addEventListener("beforeprint", () => {
  unfolded = all("details.more:not([open])");
  for (const details of unfolded) details.open = true;
  for (const table of paged) table.page.len(-1).draw();
});
window.addEventListener("afterprint", () => {
  for (const details of unfolded) details.open = false;
  for (const table of paged) table.page.len(25).draw();
});
const nearTable = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) enhance(target);
}, { rootMargin: "300px" });
for (const table of all("table.data")) nearTable.observe(table);

// ---- figures ----------------------------------------------------------------------------------
const LABEL_HEIGHT = 14; // in pixels
const NARROW = 600; // figures that are narrower have only a legend, in pixels
const hasLines = (trace) => trace.mode?.startsWith("lines+markers");
const labelWidth = (traces) => Math.max(...traces.map((trace) => trace.name.length)) * 7 + 25;

// Write the name of each visible line at its right end, in the rightmost panels. Labels that would
// overlap are moved apart. A panel without room for its labels has none, and neither has a line that
// ends before the others.
async function label(Plotly, canvas, titles) {
  canvas.titles = titles ?? canvas.titles ?? [];
  const panels = Map.groupBy(
    canvas.data.filter((trace) => hasLines(trace) && trace.visible !== "legendonly"), (trace) => trace.yaxis,
  );
  const { _fullLayout: full } = canvas;
  const right = (name) => full[`xaxis${name.slice(1)}`].domain[1];
  const rightmost = Math.max(0, ...[...panels.keys()].map(right));
  const labels = [];
  for (const [name, traces] of panels) {
    const axis = full[`yaxis${name.slice(1)}`];
    const end = traces.reduce((longest, { x }) => (x.length > longest.length ? x : longest), []).at(-1);
    const wanted = traces.flatMap((trace) => {
      const last = trace.y.findLastIndex((value) => value !== null);
      return last < 0 || trace.x[last] !== end ? [] : [{ trace, at: axis.l2p(axis.d2l(trace.y[last])) }];
    }).sort((a, b) => a.at - b.at);
    const fits = wanted.length * LABEL_HEIGHT <= axis._length && full.width >= NARROW;
    if (!fits || wanted.length < 2 || rightmost - right(name) > 0.01) continue;
    wanted.forEach((each, i) => { each.to = Math.max(each.at, i ? wanted[i - 1].to + LABEL_HEIGHT : 0); });
    wanted.reduceRight((below, each) => (each.to = Math.min(each.to, below)) - LABEL_HEIGHT, axis._length);
    for (const { trace, to } of wanted) {
      labels.push({
        x: right(name), y: 1 - (axis._offset + to - full._size.t) / full._size.h, xref: "paper", yref: "paper",
        text: `<span style="color:${trace.line.color}">\u25cf</span> ${trace.name}`, name: "label",
        showarrow: false, xanchor: "left", yanchor: "middle", font: { size: 11 },
      });
    }
  }
  await Plotly.relayout(canvas, { annotations: [...canvas.titles, ...labels] });
}
// Put all panels of a layout below each other.
function stack(layout) {
  const axes = Object.keys(layout).filter((key) => key.startsWith("yaxis"));
  const height = 1 / axes.length;
  layout.height = 90 + 290 * axes.length;
  axes.forEach((name, i) => {
    const top = 1 - i * height;
    layout[name].domain = [top - height + 80 / layout.height, top];
    layout[name].title = layout.yaxis.title;
    const across = layout[name.replace("y", "x")];
    across.domain = [0, 1];
    if (i < axes.length - 1) delete across.title; // the lowest panel has the title of all
    Object.assign(layout.annotations[i], { x: 0.5, y: top });
  });
}
const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
async function draw(figure) {
  const spec = (await data()).figures[Number(figure.dataset.f)];
  const Plotly = await plotly();
  const { log, ratio } = figure.dataset;
  const traces = spec.data.map((trace, i) => (
    ratio ? { ...trace, y: spec.ratios.y[i], error_y: undefined } : { ...trace }
  ));
  const canvas = $(".canvas", figure);
  const isWide = canvas.clientWidth >= NARROW;
  const isLabelled = isWide && traces.every(hasLines) && new Set(traces.map((trace) => trace.name)).size > 1;
  const axis = { gridcolor: style("--line"), linecolor: style("--line"), zerolinecolor: style("--line") };
  const layout = {
    ...structuredClone(spec.layout),
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--text"), size: 12 },
    margin: { l: 60, r: isLabelled ? labelWidth(traces) : 15, t: 70, b: 55 },
    legend: { orientation: "h", y: 1.06, yanchor: "bottom" },
    hoverlabel: { bgcolor: style("--panel"), font: { color: style("--text") } },
    showlegend: true,
  };
  if (!isWide && layout.yaxis2) stack(layout);
  else if (figure.closest(".figures") && !layout.yaxis2) layout.height = Math.min(layout.height, 290); // four on a screen
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    layout[name] = { exponentformat: "none", ...axis, ...layout[name] };
    if (name.startsWith("y") && log) layout[name].type = log;
    if (name.startsWith("y") && ratio) {
      layout[name] = { ...layout[name], type: log || "linear", rangemode: "normal" };
      if (layout[name].title) layout[name].title = { text: spec.ratios.label };
    }
  }
  await Plotly.react(canvas, traces, layout, {
    responsive: true, displayModeBar: false,
    toImageButtonOptions: { format: "svg", filename: $("figcaption", figure).textContent },
  });
  figure.classList.add("drawn");
  await label(Plotly, canvas, layout.annotations);
  if (!canvas.dataset.labelled) {
    canvas.dataset.labelled = "1";
    canvas.on("plotly_restyle", () => label(Plotly, canvas));
    canvas.on("plotly_relayout", (changed) => {
      if (Object.keys(changed).some((key) => key.includes("axis"))) label(Plotly, canvas);
    });
  }
  const button = $('[data-do="ratio"]', figure);
  if (spec.ratios) {
    button.hidden = false;
    button.textContent = `Relative to ${spec.ratios.to}`;
  }
  $('[data-do="log"]', figure).hidden = spec.data.some((trace) => trace.stackgroup || trace.type === "bar");
  const first = Object.keys(layout).find((key) => key.startsWith("yaxis"));
  $('[data-do="log"]', figure).setAttribute("aria-pressed", String(layout[first].type === "log"));
  button.setAttribute("aria-pressed", String(Boolean(ratio)));
}
const nearFigure = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      nearFigure.unobserve(target);
      draw(target);
    }
  }
}, { rootMargin: "400px" });
for (const figure of all("figure.plot")) nearFigure.observe(figure);

function csv(traces) {
  const quote = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const lines = ["series,panel,x,y"];
  for (const trace of traces) {
    trace.x.forEach((x, i) => lines.push([
      quote(trace.name), quote(trace.yaxis ?? ""), quote(trace.base ? trace.base[i] : x),
      quote(trace.base ? `${trace.y[i]} ${x}` : trace.y[i]),
    ].join(",")));
  }
  return lines.join("\n") + "\n";
}
function save(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
}
document.addEventListener("click", async (event) => {
  const button = event.target.closest(".tools button");
  if (!button) return;
  const figure = button.closest("figure");
  const name = $("figcaption", figure).textContent.replace(/[^\w.-]+/g, "_").slice(0, 80);
  const spec = (await data()).figures[Number(figure.dataset.f)];
  switch (button.dataset.do) {
    case "log":
      figure.dataset.log = button.getAttribute("aria-pressed") === "true" ? "linear" : "log";
      return draw(figure);
    case "ratio":
      if (figure.dataset.ratio) delete figure.dataset.ratio;
      else figure.dataset.ratio = "1";
      return draw(figure);
    case "csv":
      return save(csv(spec.data), `${name}.csv`, "text/csv");
    case "svg":
      await draw(figure);
      return (await plotly()).downloadImage($(".canvas", figure), { format: "svg", filename: name });
  }
});

// ---- records ----------------------------------------------------------------------------------
function element(tag, text = "", children = []) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}
function grid(heads, rows) {
  const head = element("tr", "", heads.map((text) => element("th", text)));
  const body = rows.map((row) => element("tr", "", row.map((text) => element("td", text))));
  return element("div", "", [element("table", "", [element("thead", "", [head]), element("tbody", "", body)])]);
}
function shownRecord(record) {
  const facts = Object.entries(record.facts).flatMap(([name, text]) => [element("dt", name), element("dd", text)]);
  const parts = [element("h3", `run ${record.run}`), element("dl", "", facts)];
  if (record.samples.length) {
    parts.push(grid(["phase", "samples", "median (ms)", "mean", "min", "max", "std"], record.samples));
  }
  if (record.conditions.length) {
    parts.push(grid(
      ["phase", "SM clock (MHz)", "power (W)", "temperature (C)", "throttled (share of samples)", "energy (J)"],
      record.conditions,
    ));
  }
  parts.push(element("p", "Parameters:"), element("pre", record.params));
  parts.push(element("p", "Repeat the measurement:"), element("pre", record.replay));
  return element("section", "", parts);
}
document.addEventListener("click", async (event) => {
  const number = event.target.closest("button.n");
  if (number) {
    const { records } = await data();
    const behind = number.dataset.r.split(",").map((index) => records[Number(index)]);
    $("#records-title").textContent = `${number.textContent}: ${behind.length} record${behind.length > 1 ? "s" : ""}`;
    const note = number.closest(".answer") ? [element("p", "The number is computed from these records.")] : [];
    $("#records-body").replaceChildren(...note, ...behind.map(shownRecord));
    $("#records").showModal();
  } else if (event.target.closest("button.copy")) {
    const button = event.target.closest("button.copy");
    await navigator.clipboard?.writeText($("code", button.parentElement).textContent);
    button.textContent = "Copied";
  } else if (event.target.id === "records") {
    $("#records").close(); // a click beside the dialog
  }
});
for (const details of all("details")) {
  details.addEventListener("toggle", () => { for (const table of all("table.data", details)) enhance(table); });
}
