// Reads rollouts: a list by step, env and group, a histogram of rewards that filters it, and the
// members of a group side by side.

import { api } from "./api.js";
import { fill, h, notice, ready } from "./dom.js";
import { num } from "./format.js";
import { bindKeys } from "./keyboard.js";
import { MODES, scaleOf, strip, turns } from "./strip.js";

const LIMIT = 200;
const BINS = 20;
const MOST_MEMBERS = 16;

export function show(root, data, params) {
	const stop = new AbortController();
	let asked = params;
	let items = [];
	let cursor = null;
	let members = [];
	let mode = "advantage";
	let reading = "tokens";
	let serial = 0;

	const field = (name, control) => h("label", {}, name, control);
	const change = (name) => (e) => go({ [name]: e.target.value, r: null, low: null, high: null });
	const step = h("input", { type: "number", min: "0", placeholder: "any", onchange: change("step") });
	const envs = h("datalist", { id: "envs" });
	const env = h("input", { placeholder: "any", list: "envs", onchange: change("env") });
	const group = h("input", { placeholder: "any, e.g. train/12", onchange: change("group") });
	const kind = h("select", { onchange: change("kind") }, ["", "train", "eval"].map((k) => h("option", { value: k }, k || "any")));
	const histogram = h("div", { class: "histogram", role: "group", "aria-label": "Rewards: choose a bar to filter" });
	const list = h("div", { class: "rollout-list" });
	const reader = h("section", { class: "reader", "aria-label": "Rollouts of the group" });
	fill(root, h("div", { class: "rollouts" }, h("aside", {}, h("div", { class: "filters" }, field("Step", step), field("Kind", kind), field("Env", env), envs, field("Group", group)), histogram, list), reader));

	const address = (changes) => {
		const next = new URLSearchParams(asked);
		for (const [name, value] of Object.entries(changes)) {
			if (value === null || value === "") next.delete(name);
			else next.set(name, value);
		}
		return `#/runs/${encodeURIComponent(data.id)}/rollouts?${next}`;
	};
	const go = (changes) => (location.hash = address(changes));

	const shown = () => {
		const [low, high] = ["low", "high"].map((name) => (asked.has(name) ? Number(asked.get(name)) : null));
		return items.filter((r) => low === null || (r.reward !== null && r.reward >= low && (r.reward < high || (high >= top() && r.reward <= high))));
	};
	const rewards = () => items.map((r) => r.reward).filter((r) => r !== null);
	const top = () => Math.max(1, ...rewards());

	function paintHistogram() {
		const all = rewards();
		const low = Math.min(0, ...all);
		const width = (top() - low) / BINS;
		const counts = new Array(BINS).fill(0);
		for (const r of all) counts[Math.min(BINS - 1, Math.floor((r - low) / width))]++;
		const most = Math.max(1, ...counts);
		const bars = counts.map((n, i) => {
			const [from, to] = [low + i * width, low + (i + 1) * width];
			const on = asked.has("low") && Math.abs(Number(asked.get("low")) - from) < 1e-9;
			return h("button", { "aria-pressed": String(on), "aria-label": `${n} rollouts with reward ${num(from)} to ${num(to)}`, title: `${n} with reward ${num(from)}–${num(to)}`, disabled: !n, onclick: () => go(on ? { low: null, high: null } : { low: from, high: to }) }, h("i", { vars: { "--tall": `${(100 * n) / most}%` } }));
		});
		fill(histogram, h("div", { class: "bars" }, bars), h("div", { class: "ends sub" }, h("span", {}, num(low)), h("span", {}, `reward of ${all.length}`), h("span", {}, num(top()))));
	}

	function paintList() {
		paintHistogram();
		const some = shown();
		const current = asked.get("r");
		const rows = some.map((r) =>
			h("a", { class: "rollout", href: address({ r: r.id }), "aria-current": r.id === current ? "true" : null }, h("span", {}, h("b", {}, `${r.group} · ${r.index}`), h("small", { class: "sub" }, ` ${r.env}`)), h("span", { class: "n" }, r.error ? h("span", { class: "wrong" }, "error") : num(r.reward), r.advantage === null ? null : h("small", { class: r.advantage < 0 ? "minus" : "plus" }, ` ${r.advantage < 0 ? "−" : "+"}${num(Math.abs(r.advantage))}`))),
		);
		fill(list, rows.length ? rows : notice("No rollouts", items.length ? "None has such a reward." : "None is finished here so far; choose another step, or clear the filters.", { action: h("a", { class: "button", href: `#/runs/${encodeURIComponent(data.id)}/rollouts` }, "Clear filters") }), cursor && h("button", { onclick: () => load(true) }, "More"));
	}

	function paintReader() {
		const current = asked.get("r");
		if (!current) {
			fill(reader, notice("Choose a rollout", "Its whole group is shown side by side. j and k go through the list."));
			return;
		}
		const tools = h(
			"div",
			{ class: "tools" },
			h("h2", {}, members[0] ? `${members[0].group} · ${members[0].env} · example ${members[0].example}` : current),
			h("span", { class: "switch", role: "group", "aria-label": "View" }, ["tokens", "turns"].map((name) => h("button", { "aria-pressed": String(reading === name), onclick: () => ((reading = name), paintReader()) }, name === "tokens" ? "Tokens" : "Turns"))),
			reading === "tokens" && h("label", { class: "inline" }, "Colour", h("select", { onchange: (e) => ((mode = e.target.value), paintReader()) }, Object.entries(MODES).map(([key, { label }]) => h("option", { value: key, selected: key === mode }, label)))),
		);
		// One scale for the whole group, so that its members can be compared.
		const most = scaleOf(members.flatMap((r) => r.samples), mode);
		const cards = members.map((r) =>
			h(
				"article",
				{ class: r.id === current ? "card current" : "card" },
				h("header", {}, h("a", { href: address({ r: r.id }) }, `Rollout ${r.index}`), h("dl", {}, [["reward", num(r.reward)], ["advantage", num(r.advantage)], ["tokens", num(r.sampled_tokens)], ["turns", num(r.turns)], ["ended by", r.stop ?? "–"]].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
				r.error && h("p", { class: "wrong" }, `${r.error.type}: ${r.error.message}`),
				r.truncated && h("span", { class: "tag" }, "truncated"),
				r.filtered && h("span", { class: "tag" }, "kept from training by a filter"),
				reading === "tokens" ? r.samples.map((sample) => strip(sample, mode, most)) : turns(r),
			),
		);
		fill(reader, tools, reading === "tokens" && h("p", { class: "sub" }, MODES[mode].note), h("div", { class: "members" }, cards));
	}

	async function load(more = false) {
		const mine = ++serial;
		const filters = Object.fromEntries(["step", "kind", "env", "group"].map((name) => [name, asked.get(name)]));
		try {
			const page = await api.rollouts(data.id, { ...filters, limit: LIMIT, after: more ? cursor : null }, stop.signal);
			if (mine !== serial) return;
			items = more ? [...items, ...page.data] : page.data;
			cursor = page.has_more ? page.next_after : null;
			fill(envs, [...new Set(items.map((r) => r.env))].map((name) => h("option", { value: name })));
			paintList();
		} catch (error) {
			if (error.name === "AbortError") return;
			fill(list, error.notServed ? notice("This server does not serve rollouts", "Update the API to read them here.", { kind: "bad" }) : notice(error.title, error.message, { kind: "bad" }));
		}
		ready("rollouts");
	}

	async function read() {
		const current = asked.get("r");
		if (!current || members.some((r) => r.id === current)) {
			paintReader();
			return;
		}
		try {
			fill(reader, h("p", { class: "loading" }, "Loading…"));
			const first = await api.rollout(data.id, current, stop.signal);
			const around = (first.members ?? []).slice(0, MOST_MEMBERS);
			if (innerWidth < 900) reader.scrollIntoView();
			members = around.length ? await Promise.all(around.map((m) => (m.id === current ? first : api.rollout(data.id, m.id, stop.signal)))) : [first];
			paintReader();
		} catch (error) {
			if (error.name !== "AbortError") fill(reader, notice(error.title ?? "It cannot be read", error.message, { kind: "bad" }));
		}
	}

	function hop(by) {
		const some = shown();
		const next = some[some.findIndex((r) => r.id === asked.get("r")) + by];
		if (next) go({ r: next.id });
	}
	const unbind = bindKeys({ j: ["Next rollout", () => hop(1)], k: ["Rollout before", () => hop(-1)], c: ["Next colouring", () => ((mode = Object.keys(MODES)[(Object.keys(MODES).indexOf(mode) + 1) % 4]), paintReader())] });

	function open(next) {
		const same = items.length && ["step", "kind", "env", "group"].every((name) => asked.get(name) === next.get(name));
		asked = next;
		for (const [name, control] of Object.entries({ step, env, group, kind })) control.value = asked.get(name) ?? "";
		if (same) paintList();
		else load();
		read();
	}
	open(params);
	return {
		navigate: open,
		destroy() {
			stop.abort();
			unbind();
		},
	};
}
