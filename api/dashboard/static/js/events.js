// The events of a run, the newest first, as they happen.

import { api } from "./api.js";
import { fill, h, helpLink, loading, notice, ready, searchField, table, trouble } from "./dom.js";
import { clock } from "./format.js";

const PAGES = 10;
const SHOWN = 500;
const RULED = ["run.health", "run.alarm", "run.eval"];

/**
 * Events of a run before the one with id `after`, the newest first; `each` is called with those of
 * each page, and with the place where omitted ones begin, if there are any.
 */
export async function loadEvents(id, signal, each, { types, after } = {}) {
	for (let i = 0; i < PAGES; i++) {
		try {
			const page = await api.events(id, { types, after, order: "desc", limit: 1000 }, signal);
			each(page.data, (after = page.next_after));
			if (!after) break;
		} catch (error) {
			// The server is still reading a long history.
			if (!error.kind?.endsWith(":history-unread") || i === PAGES - 1) throw error;
		}
	}
}

export function show(root, data, params) {
	const stop = new AbortController();
	const seen = new Set();
	const events = [];
	let left = null;
	const level = h("select", { "aria-label": "Level", onchange: () => paint() }, ["all", "warning", "error"].map((name) => h("option", { value: name }, name === "all" ? "All levels" : name === "warning" ? "Warnings and errors" : "Errors")));
	const search = searchField("Filter events", () => paint());
	const place = h("div", {}, loading());
	fill(root, h("div", { class: "tools" }, search, level), place);
	level.value = params.get("level") ?? "all";

	function paint() {
		const text = search.value.toLowerCase();
		const some = events.filter((e) => (level.value === "all" || e.level === level.value || (level.value === "warning" && e.level === "error")) && (!text || `${e.type} ${e.message}`.toLowerCase().includes(text)));
		const rows = some.slice(0, SHOWN).map((e) => h("tr", { class: `level-${e.level}` }, h("td", {}, h("time", { datetime: e.created_at }, clock(Date.parse(e.created_at) / 1000))), h("td", {}, h("code", {}, e.type)), h("td", {}, e.message, RULED.includes(e.type) && e.data.help ? [" ", helpLink(e.data.help)] : null)));
		fill(
			place,
			rows.length ? table("Events", "events", ["Time", "Type", "What happened"], rows) : notice("No events", events.length ? "No event matches the filters." : "Nothing has happened so far."),
			some.length > SHOWN ? h("p", { class: "sub" }, `The latest ${SHOWN} of ${some.length}.`) : null,
			left && h("p", { class: "sub" }, `Only the latest ${events.length} events are loaded. `, h("button", { class: "small", onclick: load }, "Load older")),
		);
	}

	/** `add` says where they belong: "push" for older events, "unshift" for newer ones. */
	function take(found, add) {
		for (const event of found) {
			if (seen.has(event.id)) continue;
			seen.add(event.id);
			events[add](event);
		}
		paint();
	}

	async function load() {
		try {
			await loadEvents(data.id, stop.signal, (found, next) => ((left = next), take(found, "push")), { after: left });
		} catch (error) {
			if (error.name !== "AbortError") fill(place, trouble(error));
		}
		ready("events");
	}
	load();
	return {
		onEvent: (event) => take([event], "unshift"),
		navigate(next) {
			level.value = next.get("level") ?? level.value;
			paint();
		},
		destroy: () => stop.abort(),
	};
}
