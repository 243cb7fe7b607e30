// Unpacks the data of the page, searches it, and shows tables, figures and records.
const $ = (selector, node = document) => node.querySelector(selector);
const all = (selector, node = document) => [...node.querySelectorAll(selector)];

const packed = Uint8Array.from(atob($("#packed").textContent), (c) => c.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const { tables, figures, records } = await new Response(unpacked).json();
for (const table of all("table.data")) table.innerHTML = tables[Number(table.dataset.t)];

// ---- theme ------------------------------------------------------------------------------------
const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function setTheme(isDark) {
  root.dataset.theme = isDark ? "dark" : "light";
  $("#theme").setAttribute("aria-pressed", String(isDark));
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
// A part is shown if it has the chosen state and no other part contains more words of the search.
// 16384 finds 16,384, and bf16 finds bfloat16.
const searched = (text) => text.toLowerCase().replace(/(\d),(?=\d{3})/g, "$1").replaceAll("bfloat16", "bf16");
const texts = new Map(); // of parts, on the chosen kind of GPU
function textOf(part) {
  if (!texts.has(part)) {
    const copy = part.cloneNode(true);
    for (const node of all(".by-device[hidden]", copy)) node.remove();
    texts.set(part, searched(copy.textContent));
  }
  return texts.get(part);
}
const chosen = { words: [], state: "" };
function select() {
  const { words, state } = chosen;
  const count = new Map(); // of the words in each part, or in the names of its problem
  for (const problem of all("section.problem")) {
    const names = `${problem.id} ${$("h2", problem).textContent} ${$(".names", problem).textContent}`.toLowerCase();
    for (const part of all("article.part", problem)) {
      const isChosen = state === "" || $(`.question .${state}:not([hidden])`, part);
      const found = words.filter((word) => names.includes(word) || textOf(part).includes(word));
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
  const which = parts && most < words.length ? ` with ${most} of the ${words.length} words` : "";
  $("#found").textContent = `${parts || "No"} part${parts === 1 ? "" : "s"} found${which}.`;
  $("#found").hidden = !isFiltered;
}
$("#search").addEventListener("input", (event) => {
  // Single letters are in almost every word.
  chosen.words = searched(event.target.value).split(/\s+/).filter((word) => !/^[a-z]?$/.test(word));
  select();
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
  texts.clear();
  chosen.state = "";
  select();
});

// ---- paper -----------------------------------------------------------------------------------
let theme;
let unfolded = []; // answers that are open on paper only
window.addEventListener("beforeprint", () => {
  theme = root.dataset.theme;
  root.dataset.theme = "light";
  unfolded = all("details.more:not([open])");
  for (const details of unfolded) details.open = true;
});
window.addEventListener("afterprint", () => {
  root.dataset.theme = theme;
  for (const details of unfolded) details.open = false;
});

// ---- figures ----------------------------------------------------------------------------------
// All at once, because a page must have its figures before it is printed.
for (const image of all("img[data-f]")) {
  image.addEventListener("load", () => {
    image.style.setProperty("--natural", `${image.naturalWidth}px`);
    image.closest("figure").classList.toggle("wide", image.naturalWidth > 900);
  });
  image.src = figures[Number(image.dataset.f)];
}

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
