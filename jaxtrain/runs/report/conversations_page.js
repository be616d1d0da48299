"use strict";
// Shows the answers of one step at a time, in the order that is chosen. Without scripts all steps are shown.
const byId = id => document.getElementById(id);
const sections = [...document.querySelectorAll("[data-step]")];

function show() {
  const chosen = byId("step"), order = byId("order").value;
  sections.forEach((section, place) => { section.hidden = place !== chosen.selectedIndex; });
  byId("before").disabled = chosen.selectedIndex <= 0;
  byId("behind").disabled = chosen.selectedIndex >= sections.length - 1;
  const shown = sections[chosen.selectedIndex]?.querySelector(".answers");
  if (!shown) return;
  const value = card => order === "file" ? Number(card.dataset.place) :
    (order === "best" ? -1 : 1) * Number(card.dataset.reward);
  shown.append(...[...shown.children].sort((a, b) => value(a) - value(b) || a.dataset.place - b.dataset.place));
}

function move(by) {
  byId("step").selectedIndex += by;
  show();
}

if (sections.length) {
  document.querySelector(".controls").hidden = false;
  const wanted = sections.findIndex(section => section.dataset.step === location.hash.slice(1));
  byId("step").selectedIndex = wanted < 0 ? sections.length - 1 : wanted;
  for (const id of ["step", "order"]) byId(id).addEventListener("input", show);
  byId("before").addEventListener("click", () => move(-1));
  byId("behind").addEventListener("click", () => move(1));
  document.querySelector(".controls").addEventListener("submit", event => event.preventDefault());
  show();
}
