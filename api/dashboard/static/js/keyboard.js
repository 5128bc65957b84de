// Keyboard shortcuts: single keys, and pairs like 'g r'. Disabled while typing.

import { ask } from "./dialog.js";
import { h } from "./dom.js";

const bound = new Map();
let before = "";

/** Binds {keys: [description, work]}; returns a function that unbinds them. */
export function bindKeys(shortcuts) {
	for (const [keys, entry] of Object.entries(shortcuts)) bound.set(keys, entry);
	return () => {
		for (const [keys, entry] of Object.entries(shortcuts)) if (bound.get(keys) === entry) bound.delete(keys);
	};
}

/** The list of shortcuts of this page. */
export function showKeys() {
	const rows = [...bound].map(([keys, [what]]) => h("tr", {}, h("th", { scope: "row" }, keys.split(" ").map((k) => h("kbd", {}, k))), h("td", {}, what)));
	ask({ title: "Keyboard shortcuts", fields: [h("table", { class: "shortcuts" }, h("tbody", {}, rows))], verb: null });
}

addEventListener("keydown", (event) => {
	const { target } = event;
	const typing = target.matches?.("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]");
	if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
	const found = bound.get(`${before} ${event.key}`) ?? bound.get(event.key);
	before = event.key;
	setTimeout(() => (before = ""), 800);
	if (found) {
		event.preventDefault();
		found[1]();
	}
});
