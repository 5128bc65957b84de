// A run's current config, with the changes made while it was running; and configs side by side.

import { api } from "./api.js";
import { checkbox, fill, h, linkTo, loading, notice, ready, searchField, table, toast, trouble } from "./dom.js";
import { flat, leaves, schemaOf } from "./schema.js";

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const isEmpty = (value) => value === null || (typeof value === "object" && !Object.keys(value).length);
const shown = (value) => (value === undefined ? h("span", { class: "sub" }, "–") : h("code", {}, JSON.stringify(value)));
const valuesOf = (config) => new Map(flat(config).map(({ key, value }) => [key, value]));
const keyCell = (key, more) => h("th", { scope: "row" }, h("code", {}, key), more);

export function show(root, data) {
	const place = h("div", {}, loading());
	const search = searchField("Filter keys", () => paint());
	const only = checkbox({ checked: true, onchange: () => paint() }, "Only what differs from the defaults");
	let config = null;
	let before = null;
	let known = new Map();
	fill(root, h("div", { class: "tools" }, search, only, h("button", { onclick: copy }, "Copy as JSON"), linkTo(`#/launch?from=${encodeURIComponent(data.id)}`, "Launch a copy")), place);

	async function copy() {
		await navigator.clipboard.writeText(JSON.stringify(config, null, 2));
		toast("Copied");
	}

	function paint() {
		if (!config) return;
		const wanted = search.value.toLowerCase();
		const rows = flat(config)
			.filter(({ key }) => key.toLowerCase().includes(wanted))
			.map(({ key, generic, value }) => {
				const leaf = known.get(generic);
				const changed = before && !same(before.get(key), value);
				// The schema has no default for what is generated per config.
				const usual = leaf?.default === undefined ? isEmpty(value) : same(leaf.default, value);
				const differs = changed || (leaf && !usual);
				if (only.firstChild.checked && !differs) return null;
				return h("tr", { class: differs ? "differs" : "" }, keyCell(key, leaf?.description && h("p", { class: "sub" }, leaf.description)), h("td", {}, changed && [h("s", {}, shown(before.get(key))), " "], shown(value), changed && h("span", { class: "tag" }, "changed while it ran")));
			});
		fill(place, rows.some(Boolean) ? table("Config", "config", ["Key", "Value"], rows) : notice("No keys", "No key that differs from the defaults matches. Show all keys, or clear the text."));
	}

	const load = async () => {
		try {
			const current = await api.config(data.id);
			// The current config includes the changes; revision 0 is what the run began with.
			before = Object.keys(current.changes).length ? valuesOf((await api.config(data.id, 0)).config) : null;
			({ config } = current);
			known = await schemaOf().then(leaves, () => new Map());
			paint();
		} catch (error) {
			fill(place, trouble(error));
		}
		ready("config");
	};
	load();
	return {};
}

/** Keys in which the configs of `ids` differ. */
export async function diff(ids) {
	const configs = await Promise.all(ids.map((id) => api.config(id).then((answer) => valuesOf(answer.config))));
	const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))].sort();
	const rows = keys
		.map((key) => [key, configs.map((config) => config.get(key))])
		.filter(([, values]) => !values.every((value) => same(value, values[0])))
		.map(([key, values]) => h("tr", {}, keyCell(key), values.map((value) => h("td", {}, shown(value)))));
	return rows.length ? table("Config", "config", ["Key", ...ids], rows) : notice("The configs are the same", "These runs have identical configs.");
}
