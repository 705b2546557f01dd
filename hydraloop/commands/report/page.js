"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const colors = ["#1f77b4", "#f08c00", "#2f9e44", "#d6336c", "#7048e8", "#0c8599", "#a87132", "#868e96"];

function template() {
  const [text, line, ground] = dark.matches ? ["#c8d0dc", "#303947", "#1c222b"] : ["#3a4554", "#e6e9ee", "#ffffff"];
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, title: { standoff: 10 } };
  return {
    layout: {
      paper_bgcolor: ground, plot_bgcolor: ground, colorway: colors,
      font: { color: text, family: "system-ui, sans-serif", size: 12 }, xaxis: axis, yaxis: axis,
      margin: { l: 50, r: 12, t: 14, b: 36 }, hoverlabel: { bgcolor: ground, bordercolor: line, font: { color: text } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    },
  };
}

function draw(place) {
  const { data, layout } = JSON.parse(document.getElementById("figure-" + place.dataset.figure).textContent);
  for (const trace of data) {
    if (typeof trace.line?.color === "number") trace.line.color = colors[trace.line.color % colors.length];
    if (trace.marker && trace.line && !trace.marker.color) trace.marker.color = trace.line.color;
  }
  const bar = matchMedia("(hover: hover)").matches ? "hover" : false;
  const config = { responsive: true, displaylogo: false, displayModeBar: bar };
  Plotly.newPlot(place, data, { ...layout, template: template() }, config);
}

const plots = document.querySelectorAll("[data-figure]");
const seen = new IntersectionObserver(
  (found) => found.filter((one) => one.isIntersecting).forEach((one) => { seen.unobserve(one.target); draw(one.target); }),
  { rootMargin: "400px" },
);
plots.forEach((place) => seen.observe(place));
dark.addEventListener("change", () => plots.forEach((place) => place.data && Plotly.relayout(place, { template: template() })));
addEventListener("beforeprint", () => plots.forEach((place) => place.data || draw(place)));

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(button.previousElementSibling);
    await navigator.clipboard?.writeText(button.previousElementSibling.textContent);
    button.textContent = "copied";
  });
}

for (const jobs of document.querySelectorAll(".jobs")) {
  const body = jobs.querySelector("tbody");
  const rows = [...body.rows];
  jobs.querySelector("input").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = [...row.cells].map((cell, index) => heads[index].textContent + "=" + cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  const heads = [...jobs.querySelectorAll("th")];
  const units = { "µs": 1e-6, ms: 1e-3, s: 1, "": 1 };
  const value = (row, index) => {
    const text = row.cells[index].textContent;
    const number = text.replaceAll(",", "").match(/^(-?[\d.]+(?:e[-+]?\d+)?)(µs|ms|s|)$/);
    const clock = text.match(/^(\d+):(\d\d):(\d\d)$/);
    if (clock) return 3600 * clock[1] + 60 * clock[2] + Number(clock[3]);
    return number ? Number(number[1]) * units[number[2]] : text === "" || text === "nan" ? null : text;
  };
  heads.forEach((head, index) => {
    head.tabIndex = 0;
    const sort = () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      heads.forEach((one) => { one.ariaSort = null; });
      head.ariaSort = sign === 1 ? "ascending" : "descending";
      const compare = (a, b) => (typeof a === typeof b && typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
      rows.sort((one, other) => {
        const [a, b] = [value(one, index), value(other, index)];
        return a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b);
      });
      body.append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}
