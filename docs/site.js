// Tables that scroll in a box of their own can be scrolled by keys.
window.addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
});
