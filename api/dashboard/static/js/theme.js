// Light, dark, or as the system has it. Colours themselves live in css/base.css.

const ORDER = ["system", "light", "dark"];
const FACES = { system: "◐", light: "☀", dark: "☾" };
const listeners = new Set();
const media = matchMedia("(prefers-color-scheme: dark)");

export const theme = () => document.documentElement.dataset.theme ?? "system";

/** Calls `listener` after each change of colours; returns how to stop that. */
export function onTheme(listener) {
	listeners.add(listener);
	return () => listeners.delete(listener);
}

const changed = () => listeners.forEach((listener) => listener());

function set(name) {
	if (name === "system") {
		delete document.documentElement.dataset.theme;
		localStorage.removeItem("ratchet.theme");
	} else {
		document.documentElement.dataset.theme = name;
		localStorage.setItem("ratchet.theme", name);
	}
	changed();
}

/** Wires the button that goes through the themes. */
export function themeButton(button) {
	const show = () => {
		button.textContent = FACES[theme()];
		button.title = `Theme: ${theme()}`;
		button.setAttribute("aria-label", `Theme: ${theme()}. Change`);
	};
	button.addEventListener("click", () => {
		set(ORDER[(ORDER.indexOf(theme()) + 1) % ORDER.length]);
		show();
	});
	media.addEventListener("change", changed);
	show();
}

/** The value of a CSS variable at this moment. */
export const cssVar = (name) =>
	getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const seriesColor = (i) => cssVar(`--series-${i % 8}`);
