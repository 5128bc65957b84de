// Builds DOM without markup strings: text is always text.

/**
 * An element. `props`: on* are listeners, aria-* may be booleans, the rest are properties or
 * attributes as in HTML; null is left out.
 */
export function h(tag, props = {}, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(props ?? {})) {
		if (value === null || value === undefined) continue;
		if (name.startsWith("aria-")) element.setAttribute(name, value);
		else if (value === false) continue;
		else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "dataset") Object.assign(element.dataset, value);
		else if (name === "vars") {
			for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
		} else if (name in element && typeof value !== "string") {
			element[name] = value;
		} else if (name === "value") element.value = value;
		else element.setAttribute(name, value === true ? "" : value);
	}
	append(element, children);
	return element;
}

function append(element, children) {
	for (const child of children.flat(Infinity)) {
		if (child === null || child === undefined || child === false) continue;
		element.append(child instanceof Node ? child : String(child));
	}
}

/** Replaces the content of `element` by `children`. */
export function fill(element, ...children) {
	element.replaceChildren();
	append(element, children);
	return element;
}

/** A link to the section of the docs that a finding names, in the copy that the dashboard serves. */
export function helpLink(help) {
	const [page, section] = help.replace(/^docs\//, "").split("#");
	return h("a", { href: `help/${page.replace(/\.md$/, ".html")}#${section}`, target: "_blank", rel: "noopener" }, "Read more");
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element. */
export function svg(tag, props = {}, ...children) {
	const element = document.createElementNS(SVG, tag);
	for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
	for (const child of children) element.append(child);
	return element;
}

/** A small note that disappears after a while. */
export function toast(text, kind = "info") {
	const note = h("div", { class: `toast ${kind}` }, text);
	document.getElementById("toasts").append(note);
	setTimeout(() => note.remove(), kind === "bad" ? 9000 : 4500);
}

/** An empty or error state: what is wrong, and what to do about it. */
export function notice(title, text, { kind = "empty", action = null, code = null } = {}) {
	return h(
		"section",
		{ class: `notice ${kind}`, role: kind === "bad" ? "alert" : null },
		h("h2", {}, title),
		text && h("p", {}, text),
		code && copyable(code),
		action,
	);
}

/** What went wrong, and what to do about it. */
export const trouble = (error, action = null) => notice(error.title ?? "That did not work", error.message, { kind: "bad", action });

/** What an API's refusal says: its title, and each mistake with its key. */
export const refusal = ({ title = "That did not work", errors = [], message }) => [
	h("b", { class: "wrong" }, title),
	errors.length ? h("ul", {}, errors.map((e) => h("li", {}, e.key && h("code", {}, e.key), " ", e.message))) : h("p", {}, message),
];

export const loading = () => h("p", { class: "loading" }, "Loading…");

/** The address of a run's page; `tab` may have a query. */
export const pageOf = (id, tab = "") => `#/runs/${encodeURIComponent(id)}${tab && `/${tab}`}`;

/** A link that looks like a button. */
export const linkTo = (href, text, kind = "") => h("a", { class: `button ${kind}`, href }, text);

/** A field that filters what is shown, or finds something. */
export const searchField = (label, oninput, more = {}) => h("input", { type: "search", placeholder: label, "aria-label": label, oninput, ...more });

/** A box to tick, with its label. */
export const checkbox = (props, ...label) => h("label", { class: "check" }, h("input", { type: "checkbox", ...props }), label);

/** A list of names with their values. */
export const pairs = (found, kind = "") => h("dl", { class: kind }, found.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

/** A table that scrolls within the page. */
export const table = (label, kind, head, rows) =>
	h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: kind }, head && h("thead", {}, h("tr", {}, head.map((text) => h("th", {}, text)))), h("tbody", {}, rows)));

/** A command with a button that copies it. */
export function copyable(code) {
	const copy = async () => {
		await navigator.clipboard.writeText(code);
		toast("Copied");
	};
	return h(
		"div",
		{ class: "copyable" },
		h("pre", { tabindex: "0" }, h("code", {}, code)),
		navigator.clipboard && h("button", { class: "small", onclick: copy }, "Copy"),
	);
}

/** Calls `work` at most once each `ms`, the last call included. */
export function throttled(work, ms) {
	let timer = 0;
	let last = -Infinity;
	return () => {
		if (timer) return;
		timer = setTimeout(
			() => {
				timer = 0;
				last = performance.now();
				work();
			},
			Math.max(0, last + ms - performance.now()),
		);
	};
}

/** Calls `work` once calls have stopped for `ms`. */
export function debounced(work, ms) {
	let timer = 0;
	const later = (...given) => {
		clearTimeout(timer);
		timer = setTimeout(() => work(...given), ms);
	};
	later.cancel = () => clearTimeout(timer);
	return later;
}

/** Signals that a page shows its content, to tests and scripts that wait for it. */
export const ready = (what) => (document.documentElement.dataset.ready = what);
