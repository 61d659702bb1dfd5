// On a phone, site.css shows the cells of a row below each other, each with the heading of its column.
document.querySelectorAll(".md-typeset table").forEach((table) => {
  const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
  table.querySelectorAll("tbody tr").forEach((row) => {
    [...row.cells].forEach((cell, column) => (cell.dataset.heading = headings[column]));
  });
});

// Code in tables breaks between words only, not after the hyphens of a flag. The longest words may break anywhere.
document.querySelectorAll(".md-typeset td code").forEach((code) => {
  const words = code.textContent.split(/(\s+)/).map((word) => {
    const part = document.createElement("span");
    part.textContent = word;
    part.className = word.length > 36 ? "" : "word";
    return part;
  });
  code.replaceChildren(...words);
});
