// What the pages do: a term shows its meaning, what scrolls can be reached by keys, menus open by keys.
"use strict";

const tip = document.createElement("div");
tip.id = "term-tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
const GLOSSARY = {ko: "용어집", zh: "术语表"};
let shown = null;

function place(link) {
  const box = link.getBoundingClientRect();
  const width = Math.min(360, document.documentElement.clientWidth - 24);
  tip.style.width = width + "px";
  const left = Math.min(box.left, document.documentElement.clientWidth - width - 12);
  tip.style.left = Math.max(12, left) + scrollX + "px";
  tip.style.top = box.bottom + scrollY + 4 + "px";
}

function open(link) {
  if (shown && shown !== link) close();
  shown = link;
  tip.replaceChildren();
  const term = document.createElement("strong");
  term.textContent = link.textContent;
  const more = document.createElement("a");
  more.href = link.href;
  more.tabIndex = -1;
  more.textContent = GLOSSARY[document.documentElement.lang] || "glossary";
  tip.append(term, ": " + link.dataset.meaning + " ", more);
  tip.hidden = false;
  link.setAttribute("aria-describedby", tip.id);
  place(link);
}

function close() {
  if (shown) shown.removeAttribute("aria-describedby");
  shown = null;
  tip.hidden = true;
}

function closeSoon() {
  setTimeout(() => {
    const held = shown && (shown.matches(":hover, :focus") || tip.matches(":hover"));
    if (!held) close();
  }, 200);
}

function watchTerms() {
  document.body.append(tip);
  let touched = false;
  for (const link of document.querySelectorAll("a.term")) {
    link.dataset.meaning = link.title;
    link.removeAttribute("title");
    link.addEventListener("pointerdown", event => { touched = event.pointerType === "touch"; });
    link.addEventListener("pointerenter", event => { if (event.pointerType !== "touch") open(link); });
    link.addEventListener("focus", () => open(link));
    link.addEventListener("pointerleave", closeSoon);
    link.addEventListener("blur", closeSoon);
    // A tap shows the meaning; the way to the glossary is inside.
    link.addEventListener("click", event => {
      if (touched) event.preventDefault();
      if (touched) open(link);
    });
  }
  tip.addEventListener("pointerleave", closeSoon);
  document.addEventListener("keydown", event => { if (event.key === "Escape") close(); });
  document.addEventListener("pointerdown", event => {
    if (shown && !tip.contains(event.target) && event.target !== shown) close();
  });
}

// What is wider than the page scrolls, and whoever has no mouse must be able to scroll it.
function watchWidths() {
  for (const part of document.querySelectorAll("article pre, .table-wrapper, .output, mjx, .math, math")) {
    const wide = part.scrollWidth > part.clientWidth + 1;
    if (wide) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
}

function watchMenus() {
  for (const label of document.querySelectorAll("label[for='__navigation'], label[for='__toc']")) {
    if (label.classList.contains("overlay")) continue;
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    // The theme's own words, which a translated page has in its language.
    label.setAttribute("aria-label", label.control.getAttribute("aria-label"));
    label.addEventListener("keydown", event => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      label.click();
    });
  }
}

watchTerms();
watchMenus();
watchWidths();
addEventListener("resize", watchWidths);
document.addEventListener("toggle", watchWidths, true);
