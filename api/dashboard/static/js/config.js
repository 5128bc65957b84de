// A run's config as it was resolved, with what was changed while it ran; and configs side by side.

import { api } from "./api.js";
import { fill, h, notice, toast, ready } from "./dom.js";
import { at, flat, leaves, schemaOf } from "./schema.js";

const shown = (value) => (value === undefined ? h("span", { class: "sub" }, "–") : h("code", {}, JSON.stringify(value)));

export const configError = (error, id) =>
	error.notServed
		? notice("This server does not serve configs", `GET /v1/runs/${id}/config is answered with ${error.status}; update the API to see the config here.`, { kind: "bad" })
		: notice(error.title ?? "No config", error.message, { kind: "bad" });

/** The rows of a table of keys, those that do not fit `wanted` left out. */
function tableOf(head, rows) {
	return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Config" }, h("table", { class: "config" }, h("thead", {}, h("tr", {}, head.map((text) => h("th", {}, text)))), h("tbody", {}, rows)));
}

export function show(root, data) {
	const place = h("div", {}, h("p", { class: "loading" }, "Loading…"));
	const search = h("input", { type: "search", placeholder: "Filter keys", "aria-label": "Filter keys", oninput: () => paint() });
	const only = h("input", { type: "checkbox", onchange: () => paint() });
	let config = null;
	let known = new Map();
	fill(root, h("div", { class: "tools" }, search, h("label", { class: "check" }, only, "Only what differs from the defaults"), h("button", { onclick: copy }, "Copy as JSON"), h("a", { class: "button", href: `#/launch?from=${encodeURIComponent(data.id)}` }, "Launch a copy")), place);

	async function copy() {
		await navigator.clipboard.writeText(JSON.stringify(config, null, 2));
		toast("Copied");
	}

	function paint() {
		if (!config) return;
		const wanted = search.value.toLowerCase();
		const changes = data.run?.config_changes ?? {};
		const rows = flat(config)
			.filter(([key]) => !wanted || key.includes(wanted))
			.map(([key, value]) => {
				const leaf = known.get(key.replace(/\.\d+\./g, ".0."));
				const changed = at(changes, key);
				const differs = changed !== undefined || (leaf?.default !== undefined && JSON.stringify(leaf.default) !== JSON.stringify(value)) || (leaf && leaf.default === undefined && value !== null);
				if (only.checked && !differs) return null;
				return h("tr", { class: differs ? "differs" : "" }, h("th", { scope: "row" }, h("code", {}, key), leaf?.description && h("p", { class: "sub" }, leaf.description)), h("td", {}, changed === undefined ? shown(value) : [h("s", {}, shown(value)), " ", shown(changed), h("span", { class: "tag" }, "changed while it ran")]));
			});
		fill(place, tableOf(["Key", "Value"], rows));
	}

	const load = async () => {
		try {
			config = (await api.config(data.id)).config;
			known = await schemaOf().then(leaves, () => new Map());
			paint();
		} catch (error) {
			fill(place, configError(error, data.id));
		}
		ready("config");
	};
	load();
	return {};
}

/** Keys in which the configs of `ids` differ. */
export async function diff(ids) {
	const configs = await Promise.all(ids.map((id) => api.config(id).then((answer) => new Map(flat(answer.config)))));
	const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))].sort();
	const rows = keys
		.map((key) => [key, configs.map((config) => config.get(key))])
		.filter(([, values]) => new Set(values.map((v) => JSON.stringify(v))).size > 1)
		.map(([key, values]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), values.map((value) => h("td", {}, shown(value)))));
	return rows.length ? tableOf(["Key", ...ids], rows) : notice("The configs are the same", "These runs differ in nothing that was configured.");
}
