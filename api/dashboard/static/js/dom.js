// Builds DOM without markup strings: text is always text.

/** An element. `props`: on* are listeners, `class` and attributes as in HTML; null is left out. */
export function h(tag, props = {}, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(props ?? {})) {
		if (value === null || value === undefined || value === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
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

/** Puts `children` in place of what `element` holds. */
export function fill(element, ...children) {
	element.replaceChildren();
	append(element, children);
	return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element. */
export function svg(tag, props = {}, ...children) {
	const element = document.createElementNS(SVG, tag);
	for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
	for (const child of children) element.append(child);
	return element;
}

/** A small note that goes away by itself. */
export function toast(text, kind = "info") {
	const note = h("div", { class: `toast ${kind}` }, text);
	document.getElementById("toasts").append(note);
	setTimeout(() => note.remove(), kind === "bad" ? 9000 : 4500);
}

/** An empty or error state: what is the matter, and what to do about it. */
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
	return (...given) => {
		clearTimeout(timer);
		timer = setTimeout(() => work(...given), ms);
	};
}

/** Says that a page shows what it is for, to whoever waits for it. */
export const ready = (what) => (document.documentElement.dataset.ready = what);
