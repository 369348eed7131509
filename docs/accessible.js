// What scrolls sideways can be reached by keyboard: wide tables, as code blocks already can.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const area of document.querySelectorAll(".md-typeset__scrollwrap")) area.tabIndex = 0;
});

// The theme's search dialog has no name of its own.
document.querySelector(".md-search").setAttribute("aria-label", "Search");
