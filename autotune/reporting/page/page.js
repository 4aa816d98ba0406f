"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;

  // Replaces "var(--name)" by the colour that it stands for in the theme of the system.
  const coloured = (value, style) => {
    if (typeof value === "string") {
      const name = /^var\((--[a-z]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    }
    return value;
  };

  const draw = () => {
    const style = getComputedStyle(root);
    const axis = { gridcolor: "var(--edge)", zerolinecolor: "var(--edge)", linecolor: "var(--edge)" };
    for (const [name, figure] of Object.entries(figures)) {
      const { xaxis, yaxis, ...rest } = figure.layout;
      const layout = coloured({
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 60, r: 16, t: 28, b: 48 },
        font: { color: "var(--ink)", family: "system-ui, sans-serif", size: 13 }, hovermode: "closest",
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, hoverlabel: { align: "left", bgcolor: "var(--ground)", bordercolor: "var(--edge)", font: { color: "var(--ink)" } },
        xaxis: { ...axis, automargin: true, ...xaxis }, yaxis: { ...axis, automargin: true, ...yaxis }, ...rest,
      }, style);
      Plotly.react(name, coloured(figure.data, style), layout, { responsive: true, displaylogo: false, displayModeBar: false });
    }
  };

  const status = document.getElementById("status");
  const words = document.getElementById("words");
  const count = document.getElementById("count");
  const rows = [...document.querySelectorAll("#candidates tbody tr")];
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = (!status.value || row.dataset.status === status.value) && wanted.every((word) => text.includes(word));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    count.textContent = `${shown} shown`;
  };

  status.addEventListener("input", filter);
  words.addEventListener("input", filter);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
