// The search of the course's pages. The index is made of scripts, so that it loads from a folder, too;
// course/site/index.py writes it: first page, anchor, title of the page and title of each section, then
// the texts in parts.
"use strict";
const SCRIPT = document.currentScript;
const ROOT = SCRIPT.dataset.index.replace("_static/index.js", "");
const EMPTY = new Set(("a an and are as at by can do does for from how i in is it me my of on or our "
  + "that the this to was what when where which who why with you your").split(" "));
const MOST = 30;

function escape(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

function wordsOf(query) {
  const all = query.toLowerCase().split(/[\s,;?!()"“”]+/).filter(Boolean);
  const full = all.filter(word => !EMPTY.has(word));
  return full.length ? full : all;
}

// What finds a word at the beginning of a word; Chinese and Korean are not parted by spaces.
function patternOf(word) {
  const start = /^[\w]/.test(word) && !/[^\x00-\u024f]/.test(word) ? "(?<![\\w])" : "";
  return new RegExp(start + escape(word), "g");
}

function count(pattern, text) {
  return (text.match(pattern) || []).length;
}

// How well a section answers: every word must be in it, or in the title of its page.
function scoreOf(entry, patterns, query) {
  let score = 0;
  let here = 0;
  for (const { pattern, whole } of patterns) {
    const title = count(pattern, entry.title);
    const text = count(pattern, entry.text);
    const page = count(pattern, entry.page);
    if (!title && !text && !page) return 0;
    here += title + text;
    score += (title ? 10 : 0) + (page ? 2 : 0) + 2 * Math.min(text, 5);
    if (whole.test(entry.title)) score += 6;
    if (whole.test(entry.text)) score += 4;
  }
  if (!here) return 0;
  if (entry.title === query) score += 30;
  if (patterns.length > 1 && (entry.title + " " + entry.text).includes(query)) score += 12;
  // A short section that says it is about it; a long one mentions much.
  score /= 1 + entry.text.length / 8000;
  // A translated page holds the English terms as well, and comes behind the page it was made from.
  if (/^[a-z]{2}\//.test(entry.address)) return 0.5 * score;
  return entry.address.startsWith("api/") ? 0.7 * score : score;
}

function search(entries, text) {
  const words = wordsOf(text);
  const query = words.join(" ");
  const patterns = words.map(word => ({
    pattern: patternOf(word),
    whole: new RegExp("(?<![\\w])" + escape(word) + "(?![\\w])"),
  }));
  const found = [];
  for (const entry of entries) {
    const score = words.length ? scoreOf(entry, patterns, query) : 0;
    if (score) found.push({ score, entry });
  }
  found.sort((one, other) => other.score - one.score);
  return { words, found };
}

// The words around the first that was looked for, those that were looked for marked.
function excerpt(entry, words) {
  const text = entry.shown;
  const places = words.map(word => text.toLowerCase().search(patternOf(word)));
  const first = Math.min(...places.filter(place => place >= 0), text.length);
  const start = first === text.length ? 0 : Math.max(0, first - 80);
  const part = text.slice(start, start + 240);
  const line = document.createElement("p");
  const finder = new RegExp("(" + words.map(escape).join("|") + ")", "gi");
  part.split(finder).forEach((piece, place) => {
    const node = place % 2 ? document.createElement("mark") : document.createTextNode("");
    node.textContent = piece;
    line.append(node);
  });
  if (start) line.prepend("… ");
  line.append(" …");
  return line;
}

// Results of what has been read so far; `whole` once all that the query needs has been.
function show(entries, text, whole) {
  const list = document.getElementById("results");
  const status = document.getElementById("found");
  const { words, found } = search(entries, text);
  list.replaceChildren();
  for (const { entry } of found.slice(0, MOST)) {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = ROOT + entry.address;
    link.textContent = entry.heading;
    const page = document.createElement("span");
    page.textContent = entry.where;
    item.append(link, page, excerpt(entry, words));
    list.append(item);
  }
  const more = found.length > MOST ? `, the best ${MOST} of them below` : "";
  status.textContent = whole ? `${found.length} places${more}` : `${found.length} places so far`;
  if (whole) document.body.dataset.searched = text;
}

let entries = [];
let parts = [];  // for each: whether it is of another language, and whether it was asked for and has come

function add(address) {
  const script = document.createElement("script");
  script.src = address;
  document.head.append(script);
}

// Who writes Chinese or Korean wants those pages, and nobody else does, though they hold the English terms
// too. All texts together would be more than a page may weigh.
function isNeeded(part, text) {
  return part.foreign === /[\u3040-\u9fff\uac00-\ud7af]/.test(text);
}

// Ask for one part at a time, the first that is missing, and show what there is.
function goOn() {
  const text = input.value;
  const missing = parts.findIndex(part => !part.come && isNeeded(part, text));
  if (missing >= 0 && !parts[missing].asked) {
    parts[missing].asked = true;
    add(SCRIPT.dataset.index.replace("index.js", `index-${missing}.js`));
  }
  if (text) show(entries, text, missing < 0);
}

window.courseIndex = function (rows, foreign) {
  entries = rows.map(([file, anchor, page, title]) => ({
    address: file + (anchor ? "#" + anchor : ""),
    heading: title || page,
    where: title === page ? "" : " · " + page,
    page: page.toLowerCase(),
    title: title.toLowerCase(),
    text: "",
    shown: "",
  }));
  parts = foreign.map(is => ({ foreign: is, asked: false, come: false }));
  goOn();
};

window.courseTexts = function (number, first, texts) {
  texts.forEach((text, place) => {
    entries[first + place].text = text.toLowerCase();
    entries[first + place].shown = text;
  });
  parts[number].come = true;
  goOn();
};

// The index is the largest file of the site, so it comes when somebody begins to search.
let begun = false;
function load() {
  if (begun) {
    if (entries.length) goOn();
    return;
  }
  begun = true;
  add(SCRIPT.dataset.index);
}

const input = document.getElementById("q");
input.value = new URLSearchParams(location.search).get("q") || "";
input.addEventListener("focus", load);
input.addEventListener("input", load);
document.querySelector("#search form").addEventListener("submit", event => event.preventDefault());
if (input.value) load();
