/* The stage viewer: an example, a stage, and the lines of one that belong to lines of the other. */
(() => {
  const root = document.querySelector(".tm-viewer");
  if (!root) return;
  const $ = (selector) => root.querySelector(selector);
  const known = {};          // example -> its data, once loaded
  let now = { example: "gelu", stage: "linalg" };
  let pinned = null;         // the source lines that a click keeps lit

  window.tinymlirStages = (name, data) => { known[name] = data; if (name === now.example) show(); };

  function load(name) {      // a script, not a request: it also works from a file
    if (known[name]) return show();
    const script = document.createElement("script");
    script.src = `${root.dataset.stages}${name}.js`;
    document.head.append(script);
  }

  function stages() { return known[now.example].stages; }
  function stage() { return stages().find((s) => s.name === now.stage) || stages()[1]; }

  function show() {
    const data = known[now.example], shown = stage();
    now.stage = shown.name;
    pinned = null;
    $(".example").value = now.example;
    $(".about").textContent = data.about;
    $(".meaning").textContent = shown.meaning;
    $(".compare").hidden = !shown.compared;
    drawTabs();
    draw($(".source pre"), stages()[0].rows, true);
    draw($(".stage pre"), shown.rows, shown.name === "numpy", shown.left);
    $(".stage .head").textContent = `${shown.title}, ${shown.rows.length + shown.left} lines`;
    $(".stage").classList.toggle("marked", shown.compared && $(".changes").checked);
    $(".stage").setAttribute("aria-labelledby", `tm-tab-${shown.name}`);
    root.classList.toggle("only-source", shown.name === "numpy");
    root.dataset.shown = `${now.example}/${shown.name}`;
    history.replaceState(null, "", `#${now.example}-${shown.name}`);
  }

  function drawTabs() {
    $(".tabs").replaceChildren(...stages().map((s) => {
      const tab = document.createElement("button");
      const chosen = s.name === now.stage;
      Object.assign(tab, { type: "button", textContent: s.title, id: `tm-tab-${s.name}` });
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", chosen);
      tab.setAttribute("aria-controls", "tm-stage");
      tab.tabIndex = chosen ? 0 : -1;
      tab.onclick = () => choose(s.name);
      return tab;
    }));
  }

  function choose(name) {
    const focused = root.contains(document.activeElement) && document.activeElement.role === "tab";
    now.stage = name;
    show();
    if (focused) $('[aria-selected="true"]').focus();
  }

  function draw(pre, rows, numbered, left = 0) {
    pre.replaceChildren(...rows.map(([html, lines, changed]) => {
      const row = document.createElement("span");
      row.className = "row" + (changed ? " new" : "") + (lines.length ? " linked" : "");
      row.dataset.lines = lines.join(" ");
      const text = document.createElement("span");
      text.innerHTML = html || " ";
      const plain = text.textContent;
      text.className = "tl";
      text.style.setProperty("--i", plain.trim() ? plain.length - plain.trimStart().length : 0);
      if (numbered) {
        const number = document.createElement("span");
        number.className = "number";
        number.textContent = lines.join("");
        row.append(number);
      }
      row.append(text);
      return row;
    }));
    if (left) pre.append(`... and ${left} more lines`);
  }

  /* ------------------------------------------------ lines that belong together */
  const linesOf = (row) => row.dataset.lines.split(" ").filter(Boolean);

  function light(lines) {
    for (const row of root.querySelectorAll(".row"))
      row.classList.toggle("lit", linesOf(row).some((line) => lines.includes(line)));
  }

  function reveal(pane) {      // within the pane alone: the page stays where it is
    const row = pane.querySelector(".row.lit"), pre = pane.querySelector("pre");
    if (row) pre.scrollTop = row.offsetTop - pre.clientHeight / 3;
  }

  root.addEventListener("mouseover", (event) => {
    const row = event.target.closest(".row");
    if (row && pinned === null) light(linesOf(row));
  });
  root.addEventListener("mouseleave", () => { if (pinned === null) light([]); });
  root.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const lines = linesOf(row), again = pinned !== null && String(pinned) === String(lines);
    pinned = again || !lines.length ? null : lines;
    light(pinned || []);
    if (pinned) reveal(row.closest(".source") ? $(".stage") : $(".source"));
  });

  /* ------------------------------------------------ the keyboard */
  $(".tabs").addEventListener("keydown", (event) => {
    const names = stages().map((s) => s.name), at = names.indexOf(now.stage);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(names[(to + names.length) % names.length]);
  });
  $(".source pre").addEventListener("keydown", (event) => {  // up and down walk along the source
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...new Set([...root.querySelectorAll(".source .linked")].flatMap(linesOf))];
    const at = all.indexOf(pinned ? pinned[0] : "");
    pinned = [all[Math.min(Math.max(at + step, 0), all.length - 1)]];
    light(pinned);
    reveal($(".stage"));
  });

  $(".example").onchange = (event) => { now.example = event.target.value; load(now.example); };
  $(".changes").onchange = show;
  function follow() {
    const [example, name] = location.hash.slice(1).split("-");
    if ([...$(".example").options].some((o) => o.value === example)) now = { example, stage: name || now.stage };
    load(now.example);
  }
  addEventListener("hashchange", follow);
  follow();
})();
