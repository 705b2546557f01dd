"use strict";
const colors = { text: "#738091", line: "rgba(128, 138, 150, .22)", box: "#1c2430" };  // on light and dark pages
const axis = { gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, automargin: true, title: { standoff: 10 } };
const template = {
  layout: {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", xaxis: axis, yaxis: axis,
    font: { color: colors.text, family: "system-ui, sans-serif", size: 12 }, margin: { l: 50, r: 12, t: 14, b: 36 },
    hoverlabel: { bgcolor: colors.box, bordercolor: colors.box, font: { color: "#fff" } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
  },
};

function draw(place) {
  const { data, layout } = JSON.parse(document.getElementById("figure-" + place.dataset.figure).textContent);
  const bar = matchMedia("(hover: hover)").matches ? "hover" : false;
  Plotly.newPlot(place, data, { ...layout, template }, { responsive: true, displaylogo: false, displayModeBar: bar });
}

const plots = document.querySelectorAll("[data-figure]");
const seen = new IntersectionObserver(
  (found) => found.filter((one) => one.isIntersecting).forEach((one) => { seen.unobserve(one.target); draw(one.target); }),
  { rootMargin: "400px" },
);
plots.forEach((place) => seen.observe(place));
addEventListener("beforeprint", () => plots.forEach((place) => place.data || (place.offsetParent && draw(place))));

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(button.previousElementSibling);
    await navigator.clipboard?.writeText(button.previousElementSibling.textContent);
    button.textContent = "copied";
  });
}

for (const jobs of document.querySelectorAll(".jobs")) {
  const rows = [...jobs.querySelectorAll("tbody tr")];
  const heads = [...jobs.querySelectorAll("th")];
  jobs.querySelector("input").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = heads.map((head, index) => `${head.textContent}=${row.cells[index].textContent}`).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  const units = { "µs": 1e-6, ms: 1e-3, s: 1, "": 1 };
  const value = (text) => {
    if (/^\d+:\d\d:\d\d$/.test(text)) return text.split(":").reduce((sum, part) => 60 * sum + Number(part), 0);
    const number = text.replaceAll(",", "").match(/^(-?[\d.]+(?:e[-+]?\d+)?)(µs|ms|s|)$/);
    return number ? number[1] * units[number[2]] : text === "nan" ? "" : text;
  };
  heads.forEach((head, index) => {
    head.tabIndex = 0;
    const sort = () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      heads.forEach((one) => { one.ariaSort = null; });
      head.ariaSort = sign === 1 ? "ascending" : "descending";
      rows.sort((...pair) => {
        const [a, b] = pair.map((row) => value(row.cells[index].textContent));
        if (a === "" || b === "") return (a === "") - (b === "");
        return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b));
      });
      jobs.querySelector("tbody").append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}

const seconds = Number(document.body.dataset.reload);
const isFiltered = () => [...document.querySelectorAll("input")].some((one) => one.value);  // a reload would lose it
if (seconds) setInterval(() => isFiltered() || location.reload(), 1000 * seconds);  // it keeps the scroll position
