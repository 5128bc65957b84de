// Asks before acting. The native dialog keeps focus inside and closes on Escape.

import { fill, h, refusal } from "./dom.js";

/**
 * Shows a dialog and resolves to its form's values by name, or null if it was dismissed.
 * `act(values)` runs while the dialog is open; its errors are shown in the dialog.
 * `verb` and `dismiss` label its buttons. Without `verb` there is nothing to confirm.
 */
export function ask({ title, text = "", fields = [], verb = "OK", dismiss = verb ? "Back" : "Close", danger = false, act = null, wide = false }) {
	const trouble = h("div", { class: "trouble", role: "alert" });
	const confirm = verb && h("button", { class: `primary${danger ? " danger" : ""}`, type: "submit" }, verb);
	const heading = `d${Math.random().toString(36).slice(2)}`;
	const dialog = h(
		"dialog",
		{ class: wide ? "wide" : "", "aria-labelledby": heading },
		h(
			"form",
			{ method: "dialog" },
			h("h2", { id: heading }, title),
			text && h("p", {}, text),
			fields,
			trouble,
			h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, dismiss), confirm),
		),
	);
	document.body.append(dialog);
	return new Promise((resolve) => {
		let given = null;
		dialog.querySelector("form").addEventListener("submit", async (event) => {
			event.preventDefault();
			const values = Object.fromEntries(new FormData(event.target));
			confirm.disabled = true;
			fill(trouble);
			try {
				given = act ? ((await act(values)) ?? values) : values;
				dialog.close();
			} catch (error) {
				fill(trouble, refusal(error));
			}
			confirm.disabled = false;
		});
		dialog.addEventListener("close", () => {
			dialog.remove();
			resolve(given);
		});
		dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
		dialog.showModal();
	});
}
