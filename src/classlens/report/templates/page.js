// A click on a heading sorts its table; a second click turns the order round. Empty cells stay last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), column = head.cellIndex;
    const rows = [...table.tBodies[0].rows], value = row => row.cells[column].dataset.v;
    const numeric = rows.every(row => value(row) === "" || !isNaN(value(row)));
    const down = head.ariaSort ? head.ariaSort !== "descending" : numeric;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return (numeric ? x - y : x.localeCompare(y)) * (down ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  });
}
