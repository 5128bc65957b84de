// Light, dark, or the system's theme. The colours live in css/base.css.

const ORDER = ["system", "light", "dark"];
const FACES = { system: "◐", light: "☀", dark: "☾" };
const listeners = new Set();
const media = matchMedia("(prefers-color-scheme: dark)");

export const theme = () => document.documentElement.dataset.theme ?? "system";

/** Calls `listener` after each change of colours; returns a function that stops that. */
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

/** Wires the button that cycles through the themes. */
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

/** A CSS color as canvas understands it, in the current theme. */
export function resolved(color) {
	const probe = document.createElement("i");
	probe.style.color = color;
	document.body.append(probe);
	const value = getComputedStyle(probe).color;
	probe.remove();
	return value;
}

/** The color that a CSS variable holds. */
export const cssVar = (name) => resolved(`var(${name})`);

export const seriesColor = (i) => cssVar(`--series-${i % 8}`);
