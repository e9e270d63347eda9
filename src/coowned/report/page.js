"use strict";
(async () => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const options = { actions: false, renderer: "svg", ast: true, defaultStyle: false, tooltip: { theme: "page" } };
  for (const [name, chart] of Object.entries(charts)) {
    const element = document.getElementById(`chart-${name}`);
    try {
      await vegaEmbed(element, chart, options);
    } catch (error) {
      element.textContent = "This chart could not be drawn; its rows are in the table below.";
      console.error(name, error);
    }
  }
  document.documentElement.dataset.charts = "drawn";
})();
