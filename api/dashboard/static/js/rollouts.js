// Shows rollouts: a list by step, env and group, a histogram of rewards that filters it, and the
// members of a group side by side; of a large group, those around the selected one.

import { api } from "./api.js";
import { fill, h, linkTo, loading, notice, pageOf, ready, trouble } from "./dom.js";
import { damageLine, num } from "./format.js";
import { bindKeys } from "./keyboard.js";
import { marked, MODES, scaleOf, strip, turns } from "./strip.js";

const LIMIT = 200;
const BINS = 20;
const MOST_MEMBERS = 16;
const FILTERS = ["step", "kind", "env", "group", "errored"];
// Where bars meet, in parts of a bar: rewards like 0.3 are no exact sums of widths.
const EDGE = 1e-6;

export function show(root, data, params) {
	const stop = new AbortController();
	let asked = params;
	let items = [];
	let cursor = null;
	let damaged = [];
	let note = null;
	// Rewards of everything that matches the filters, whichever bar is selected; and those filters.
	let rewards = [];
	let rewardsOf = null;
	let members = [];
	let group = [];
	const whole = new Map();
	let mode = "advantage";
	let reading = "tokens";
	let spaces = false;
	let serial = 0;
	let reads = 0;

	const field = (name, control) => h("label", {}, name, control);
	const change = (name) => (e) => go({ [name]: e.target.value, r: null, low: null, high: null });
	const step = h("input", { type: "number", min: "0", placeholder: "any", onchange: change("step") });
	const envs = h("datalist", { id: "envs" });
	const env = h("input", { placeholder: "any", list: "envs", onchange: change("env") });
	const groups = h("input", { placeholder: "any, e.g. train/12", onchange: change("group") });
	const select = (name, choices) => h("select", { onchange: change(name) }, Object.entries(choices).map(([value, label]) => h("option", { value }, label)));
	const kind = select("kind", { "": "any", train: "train", eval: "eval" });
	const errored = select("errored", { "": "any", true: "failed", false: "not failed" });
	const histogram = h("div", { class: "histogram", role: "group", "aria-label": "Rewards: choose a bar to filter" });
	const list = h("div", { class: "rollout-list" });
	const reader = h("section", { class: "reader", "aria-label": "Rollouts of the group" });
	fill(root, h("div", { class: "rollouts" }, h("aside", {}, h("div", { class: "filters" }, field("Step", step), field("Kind", kind), field("Env", env), envs, field("Group", groups), field("Errors", errored)), histogram, list), reader));

	const address = (changes) => {
		const next = new URLSearchParams(asked);
		for (const [name, value] of Object.entries(changes)) {
			if (value === null || value === "") next.delete(name);
			else next.set(name, value);
		}
		return pageOf(data.id, `rollouts?${next}`);
	};
	/** The open rollout: the requested one, else the first of the list. */
	const chosen = () => asked.get("r") ?? items[0]?.id ?? null;
	const go = (changes) => (location.hash = address(changes));

	function paintHistogram() {
		if (!rewards.length) return fill(histogram);
		const low = Math.min(0, ...rewards);
		const top = Math.max(1, ...rewards);
		const width = (top - low) / BINS;
		const counts = new Array(BINS).fill(0);
		for (const r of rewards) counts[Math.min(BINS - 1, Math.floor((r - low) / width + EDGE))]++;
		const most = Math.max(1, ...counts);
		const bars = counts.map((n, i) => {
			const [from, to] = [low + (i - EDGE) * width, low + (i + 1 - EDGE) * width];
			const on = asked.has("low") && Math.abs(Number(asked.get("low")) - from) < EDGE * width;
			const text = `${n} with reward ${num(low + i * width)} to ${num(to)}`;
			return h("button", { "aria-pressed": on, "aria-label": text, title: text, disabled: !n, onclick: () => go(on ? { low: null, high: null } : { low: from, high: i < BINS - 1 ? to : null }) }, h("i", { vars: { "--tall": `${(100 * n) / most}%` } }));
		});
		fill(histogram, h("div", { class: "bars" }, bars), h("div", { class: "ends sub" }, h("span", {}, num(low)), h("span", {}, `reward of ${rewards.length}`), h("span", {}, num(top))));
	}

	function paintList() {
		paintHistogram();
		const current = chosen();
		const rows = items.map((r) =>
			h("a", { class: "rollout", href: address({ r: r.id }), "aria-current": r.id === current ? "true" : null }, h("span", {}, h("b", {}, `${r.group} · ${r.index}`), h("small", { class: "sub" }, ` ${r.env}${r.filtered ? " · filtered" : ""}`)), h("span", { class: "n" }, r.error ? h("span", { class: "wrong" }, "error") : num(r.reward), r.advantage === null ? null : h("small", { class: r.advantage < 0 ? "minus" : "plus" }, ` ${r.advantage < 0 ? "−" : "+"}${num(Math.abs(r.advantage))}`)), preview(r)),
		);
		const damage = damageLine("groups", damaged);
		fill(list, damage && h("p", { class: "wrong", role: "status" }, damage), note && h("p", { class: "sub", role: "status" }, `This step has no train rollouts: ${note}.`), rows.length ? rows : notice("No rollouts", cursor ? "No match so far." : "No finished rollout matches; choose another step, or clear the filters.", { action: linkTo(pageOf(data.id, "rollouts"), "Clear filters") }), cursor && h("button", { onclick: () => load(true) }, "More"));
	}

	/** The step and the beginning of the prompt. */
	const preview = (r) => {
		const text = [r.step === null ? null : `step ${r.step}`, r.prompt].filter(Boolean).join(" · ");
		return text && h("small", { class: "sub preview", title: r.prompt ?? "" }, text);
	};

	/** What is known of a rollout, in one line. */
	function head(r) {
		const signed = r.advantage === null ? "" : ` (${r.advantage < 0 ? "−" : "+"}${num(Math.abs(r.advantage))})`;
		const some = [r.error ? "failed" : `${num(r.reward)}${signed}`, r.error && !r.sampled_tokens ? null : `${num(r.sampled_tokens)} tok`, r.turns === null ? null : `${num(r.turns)} turn${r.turns === 1 ? "" : "s"}`, r.stop];
		const text = some.filter(Boolean).join(" · ");
		return h("header", { title: `Reward (advantage) · sampled tokens · turns · ended by: ${text}` }, h("a", { href: address({ r: r.id }) }, `Rollout ${r.index}`), " ", h("span", { class: "sub" }, text));
	}

	/** A rollout that failed early has no tokens, or no messages: shows what there is. */
	function body(r, most) {
		const look = spaces ? marked : String;
		if (!r.samples.length && !r.messages.length) return h("p", { class: "sub" }, "It ended before the first message.");
		return reading === "tokens" && r.samples.length ? r.samples.map((sample) => strip(sample, mode, most, look)) : turns(r, look);
	}

	function paintReader() {
		const current = chosen();
		if (!current) {
			fill(reader, notice("Choose a rollout", "Its whole group is shown side by side. j and k go through the list."));
			return;
		}
		const tools = h(
			"div",
			{ class: "tools" },
			h("h2", {}, members[0] ? `${members[0].group} · ${members[0].env} · example ${members[0].example}` : current),
			h("span", { class: "switch", role: "group", "aria-label": "View" }, ["tokens", "turns"].map((name) => h("button", { "aria-pressed": reading === name, onclick: () => ((reading = name), paintReader()) }, name === "tokens" ? "Tokens" : "Turns"))),
			h("button", { "aria-pressed": spaces, title: "Show spaces as ·, tabs as → and newlines as ↵ (w)", onclick: () => ((spaces = !spaces), paintReader()) }, "Whitespace"),
			reading === "tokens" && h("label", { class: "inline" }, "Colour", h("select", { onchange: (e) => ((mode = e.target.value), paintReader()) }, Object.entries(MODES).map(([key, { label }]) => h("option", { value: key, selected: key === mode }, label)))),
		);
		// One scale for the whole group, so that its members can be compared.
		const most = scaleOf(members.flatMap((r) => r.samples), mode);
		const cards = members.map((r) =>
			h(
				"article",
				{ class: r.id === current ? "card current" : "card" },
				head(r),
				r.error && h("p", { class: "wrong" }, `${r.error.type}: ${r.error.message}`),
				r.error?.frames?.map((at) => h("p", {}, `${at.file}:${at.line} in ${at.function}`)),
				r.truncated && h("span", { class: "tag" }, "truncated"),
				r.filtered && h("span", { class: "tag" }, "filtered out of training"),
				body(r, most),
			),
		);
		fill(reader, tools, reading === "tokens" && h("p", { class: "sub" }, MODES[mode].note), pager(), h("div", { class: "members" }, cards));
	}

	/** The range of members shown, with links to those before and after. */
	function pager() {
		if (group.length <= members.length) return null;
		const first = group.findIndex((r) => r.id === members[0].id);
		const to = (place, label) => group[place] && linkTo(address({ r: group[place].id }), label, "small");
		return h("p", { class: "tools" }, to(first - 1, "Before"), `Members ${first + 1} to ${first + members.length} of ${group.length}`, to(first + members.length, "After"));
	}

	async function load(more = false) {
		const mine = ++serial;
		const filters = Object.fromEntries(FILTERS.map((name) => [name, asked.get(name)]));
		const range = { reward_min: asked.get("low"), reward_max: asked.get("high") };
		const text = JSON.stringify(filters);
		const page = (params) => api.rollouts(data.id, { ...filters, ...params, limit: LIMIT }, stop.signal);
		try {
			const [found, all] = await Promise.all([page({ ...range, after: more ? cursor : null }), asked.has("low") && rewardsOf !== text ? page() : null]);
			if (mine !== serial) return;
			items = more ? [...items, ...found.data] : found.data;
			damaged = more ? [...damaged, ...found.damaged] : found.damaged;
			note = found.note;
			cursor = found.has_more ? found.next_after : null;
			if (all || !asked.has("low")) rewards = (all?.data ?? items).filter((r) => !r.error && r.reward !== null).map((r) => r.reward);
			rewardsOf = text;
			fill(envs, [...new Set(items.map((r) => r.env))].map((name) => h("option", { value: name })));
			paintList();
			if (!asked.has("r")) choose();
		} catch (error) {
			if (error.name === "AbortError") return;
			fill(list, trouble(error));
		}
		ready("rollouts");
	}

	/** A rollout with all its tokens; those of the current group are fetched once. */
	function read(id) {
		if (!whole.has(id)) whole.set(id, api.rollout(data.id, id, stop.signal).catch((error) => (whole.delete(id), Promise.reject(error))));
		return whole.get(id);
	}

	/** Shows the group of the selected rollout. */
	async function choose() {
		const mine = ++reads;
		const current = chosen();
		if (!current || members.some((r) => r.id === current)) return paintReader();
		try {
			if (!group.some((r) => r.id === current)) {
				whole.clear();
				fill(reader, loading());
			}
			const first = await read(current);
			const place = first.members.findIndex((r) => r.id === current);
			const from = Math.max(0, Math.min(place - MOST_MEMBERS / 2, first.members.length - MOST_MEMBERS));
			const around = await Promise.all(first.members.slice(from, from + MOST_MEMBERS).map((r) => read(r.id)));
			if (mine !== reads) return;
			group = first.members;
			members = around;
			paintReader();
			if (innerWidth < 900 && asked.has("r")) reader.scrollIntoView();
		} catch (error) {
			if (error.name !== "AbortError" && mine === reads) fill(reader, trouble(error));
		}
	}

	function hop(by) {
		const next = items[items.findIndex((r) => r.id === chosen()) + by];
		if (next) go({ r: next.id });
	}
	const unbind = bindKeys({ j: ["Next rollout", () => hop(1)], k: ["Rollout before", () => hop(-1)], c: ["Next colouring", () => ((mode = Object.keys(MODES)[(Object.keys(MODES).indexOf(mode) + 1) % 4]), paintReader())], w: ["Show whitespace", () => ((spaces = !spaces), paintReader())] });

	const listed = (params) => [...FILTERS, "low", "high"].map((name) => params.get(name)).join();
	function open(next) {
		const same = rewardsOf && listed(asked) === listed(next);
		asked = next;
		for (const [name, control] of Object.entries({ step, env, group: groups, kind, errored })) control.value = asked.get(name) ?? "";
		if (same) paintList();
		else load();
		choose();
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
