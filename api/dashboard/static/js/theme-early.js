// Sets the chosen theme before the first paint, so that the page does not flash.
const chosen = localStorage.getItem("ratchet.theme");
if (chosen) document.documentElement.dataset.theme = chosen;
