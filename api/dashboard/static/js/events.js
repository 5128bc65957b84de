// What happened to a run, the newest first, as it comes.

import { api } from "./api.js";
import { fill, h, notice, ready } from "./dom.js";
import { clock } from "./format.js";

const MOST_PAGES = 20;
const SHOWN = 500;

/** All events kept of a run, page by page; `each` is called after each page. */
export async function loadEvents(id, signal, each = () => {}) {
	const found = [];
	for (let i = 0; i < MOST_PAGES; i++) {
		const page = await api.events(id, { after: found.at(-1)?.id, limit: 1000 }, signal);
		found.push(...page.data);
		each(found);
		if (!page.has_more) break;
	}
	return found;
}

export const eventsError = (error, id) =>
	error.notServed
		? notice("This server does not serve events", `GET /v1/runs/${id}/events is answered with ${error.status}; update the API to see them here.`, { kind: "bad" })
		: notice(error.title ?? "No events", error.message, { kind: "bad" });

export function show(root, data) {
	const stop = new AbortController();
	const seen = new Set();
	let events = [];
	const level = h("select", { "aria-label": "Level", onchange: () => paint() }, ["all", "warning", "error"].map((name) => h("option", { value: name }, name === "all" ? "All levels" : name === "warning" ? "Warnings and errors" : "Errors")));
	const search = h("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", oninput: () => paint() });
	const place = h("div", {}, h("p", { class: "loading" }, "Loading…"));
	fill(root, h("div", { class: "tools" }, search, level), place);

	function paint() {
		const text = search.value.toLowerCase();
		const some = events.filter((e) => (level.value === "all" || e.level === level.value || (level.value === "warning" && e.level === "error")) && (!text || `${e.type} ${e.message}`.toLowerCase().includes(text)));
		const rows = some.slice(-SHOWN).reverse().map((e) => h("tr", { class: `level-${e.level}` }, h("td", {}, h("time", { datetime: e.created_at }, clock(Date.parse(e.created_at) / 1000))), h("td", {}, h("code", {}, e.type)), h("td", {}, e.message)));
		fill(
			place,
			rows.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, h("table", { class: "events" }, h("thead", {}, h("tr", {}, ["Time", "Type", "What happened"].map((t) => h("th", {}, t)))), h("tbody", {}, rows))) : notice("No events", events.length ? "None fits the filters." : "Nothing has happened so far."),
			some.length > SHOWN ? h("p", { class: "sub" }, `The latest ${SHOWN} of ${some.length}.`) : null,
		);
	}

	function take(found) {
		for (const event of found) {
			if (seen.has(event.id)) continue;
			seen.add(event.id);
			events.push(event);
		}
	}

	loadEvents(data.id, stop.signal, (found) => (take(found), paint()))
		.catch((error) => error.name === "AbortError" || fill(place, eventsError(error, data.id)))
		.finally(() => (ready("events")));
	return {
		onEvent(event) {
			take([event]);
			paint();
		},
		destroy: () => stop.abort(),
	};
}
