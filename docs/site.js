// On a phone, site.css shows the cells of a row below each other, each with the heading of its column.
document.querySelectorAll(".md-typeset table").forEach((table) => {
  const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
  table.querySelectorAll("tbody tr").forEach((row) => {
    [...row.cells].forEach((cell, column) => (cell.dataset.heading = headings[column]));
  });
});
